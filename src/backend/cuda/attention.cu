/* attention.cu - softmax(q k^T / sqrt(D)) v over a cache.
 *
 * in : q of N rows, keys and values of a store, a range of its rows for each row of q
 * out: y, and the logarithm of each denominator if asked
 *
 * Three methods. "Plain" takes any shape in f32, one query head a CTA. "Few" is for decoding: the
 * query heads that share a key are the rows of a tensor core product, so each key and value is
 * read once, from global memory straight into operands. "Tiles" is for prompts: 128 rows of
 * queries against tiles of 64 keys in shared memory. Plain and few divide a long range among CTAs;
 * each leaves a part (maximum, sum, weighted values), and a second kernel adds them in order.
 *
 * Scores are kept in units of log2, so that exp2 is all that is needed. Rows of the store outside
 * a row's range may hold NaN and must not reach a product, not even times 0. */
#include "backend/cuda/internal.cuh"

#define LOG2E 1.4426950408889634f
#define LN2   0.6931471805599453f

/* The exponent's base follows the maximum only once it lags by this much: until then values are at
 * most 2^LAG times too large, which changes no digit, and nothing need be scaled again. */
#define LAG 8.0f

#define FEW_ROWS    64 /* N up to which a call counts as decoding */
#define SPLITS_MAX  256
#define PARTS_BYTES ((int64_t)16 << 20)

struct attend {
    float *y, *lse; /* lse may be null */
    const float *q;
    const uint8_t *k, *v;
    const int32_t *first, *last;
    float *parts; /* values [N, NH, splits, D], then maximum and sum [N, NH, splits, 2] */
    int N, NH, NKV, D, group, splits;
    float scale; /* log2(e) / sqrt(D) */
};

struct range {
    int begin, end;
};

/* What split z of row n has of its range, in whole steps. May be empty. */
__device__ static inline struct range range_of(const struct attend &a, int n, int z, int step)
{
    int first = a.first[n], end = a.last[n] + 1;
    int each = (end - first + a.splits - 1) / a.splits;
    each = (each + step - 1) / step * step;
    /* Past the end in 64 bits, since z * each may be. */
    int64_t begin = (int64_t)first + (int64_t)z * each;
    if (begin >= end)
        return {end, end};
    return {(int)begin, (int)min(begin + each, (int64_t)end)};
}

__device__ static inline float *part_values(const struct attend &a, int64_t head, int split)
{
    return a.parts + (head * a.splits + split) * a.D;
}

__device__ static inline float2 *part_sums(const struct attend &a, int64_t head, int split)
{
    return (float2 *)(a.parts + (int64_t)a.N * a.NH * a.splits * a.D) + head * a.splits + split;
}

/* ---- parts ---- */

#define PLAIN_THREADS 128

/* y of one query head from its parts, in the order of the splits. */
__global__ __launch_bounds__(PLAIN_THREADS) static void k_attend_combine(struct attend a)
{
    __shared__ float weight[SPLITS_MAX], total;
    int64_t head = (int64_t)blockIdx.x * a.NH + blockIdx.y;
    const float2 *sums = part_sums(a, head, 0);
    if (threadIdx.x < 32) {
        float top = -INFINITY, sum = 0;
        for (int z = threadIdx.x; z < a.splits; z += 32)
            top = fmaxf(top, sums[z].x);
        top = warp_max(top);
        for (int z = threadIdx.x; z < a.splits; z += 32) {
            float w = exp2f(sums[z].x - top);
            weight[z] = w;
            sum += w * sums[z].y;
        }
        sum = warp_sum(sum);
        if (threadIdx.x == 0) {
            total = sum;
            if (a.lse)
                a.lse[head] = (top + log2f(sum)) * LN2;
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < a.D; d += PLAIN_THREADS) {
        const float *values = part_values(a, head, 0) + d;
        float acc = 0;
#pragma unroll 8
        for (int z = 0; z < a.splits; z++)
            acc += weight[z] * values[(int64_t)z * a.D];
        a.y[head * a.D + d] = acc / total;
    }
}

/* ---- plain ---- */

#define PLAIN_KEYS 64
#define PLAIN_EACH (NBI_HEAD_MAX / PLAIN_THREADS)

/* Weights of the scores of a block, the running maximum and sum, and what to scale the past with.
 * Every warp does the same; the first one keeps the weights. */
__device__ static inline float plain_weights(float *score, int count, float *top, float *sum)
{
    int lane = threadIdx.x % 32;
    float s0 = lane < count ? score[lane] : -INFINITY;
    float s1 = lane + 32 < count ? score[lane + 32] : -INFINITY;
    float high = fmaxf(*top, warp_max(fmaxf(s0, s1)));
    float keep = exp2f(*top - high), p0 = exp2f(s0 - high), p1 = exp2f(s1 - high);
    *top = high;
    *sum = *sum * keep + warp_sum(p0 + p1);
    __syncthreads(); /* all have read the scores */
    if (threadIdx.x < 32) {
        score[lane] = p0;
        score[lane + 32] = p1;
    }
    __syncthreads();
    return keep;
}

template <enum nbi_dtype TYPE>
__global__ __launch_bounds__(PLAIN_THREADS) static void k_attend_plain(struct attend a)
{
    __shared__ float q[NBI_HEAD_MAX], score[PLAIN_KEYS];
    int n = blockIdx.x, h = blockIdx.y, split = blockIdx.z, D = a.D;
    int64_t head = (int64_t)n * a.NH + h, stride = (int64_t)a.NKV * D;
    int64_t at0 = (int64_t)(h / a.group) * D;
    struct range r = range_of(a, n, split, PLAIN_KEYS);
    for (int d = threadIdx.x; d < D; d += PLAIN_THREADS)
        q[d] = a.q[head * D + d] * a.scale;

    float acc[PLAIN_EACH] = {0}, top = -INFINITY, sum = 0;
    for (int key = r.begin; key < r.end; key += PLAIN_KEYS) {
        int count = min(PLAIN_KEYS, r.end - key);
        __syncthreads(); /* q is there; the weights of the block before were used */
        for (int i = threadIdx.x / 32; i < count; i += PLAIN_THREADS / 32) {
            int64_t at = at0 + (key + i) * stride;
            float s = 0;
            for (int d = threadIdx.x % 32; d < D; d += 32)
                s += q[d] * load_float(a.k, at + d, TYPE);
            s = warp_sum(s);
            if (threadIdx.x % 32 == 0)
                score[i] = s;
        }
        __syncthreads();
        float keep = plain_weights(score, count, &top, &sum);
#pragma unroll
        for (int j = 0; j < PLAIN_EACH; j++) {
            int d = threadIdx.x + j * PLAIN_THREADS;
            if (d >= D)
                break;
            float part = acc[j] * keep;
#pragma unroll 4
            for (int i = 0; i < count; i++)
                part += score[i] * load_float(a.v, at0 + (key + i) * stride + d, TYPE);
            acc[j] = part;
        }
    }

    float *y = a.splits > 1 ? part_values(a, head, split) : a.y + head * D;
#pragma unroll
    for (int j = 0; j < PLAIN_EACH; j++) {
        int d = threadIdx.x + j * PLAIN_THREADS;
        if (d < D)
            y[d] = a.splits > 1 ? acc[j] : acc[j] / sum;
    }
    if (threadIdx.x == 0 && a.splits > 1)
        *part_sums(a, head, split) = make_float2(top, sum);
    else if (threadIdx.x == 0 && a.lse)
        a.lse[head] = (top + log2f(sum)) * LN2;
}

/* ---- tensor cores ---- */

__device__ static inline float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Infinity in f16 would become NaN in a product; NaN stays what it is. */
__device__ static inline float fit_f16(float x)
{
    return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
}

/* Two floats as bf16 or f16, the first in the low half. */
template <bool BF> __device__ static inline uint32_t pack(float lo, float hi)
{
    if (BF) {
        __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&b;
    }
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&h;
}

/* What rounding to pack<BF> leaves over. */
template <bool BF> __device__ static inline uint32_t pack_rest(uint32_t packed, float lo, float hi)
{
    float2 f =
        BF ? __bfloat1622float2(*(__nv_bfloat162 *)&packed) : __half22float2(*(__half2 *)&packed);
    return pack<BF>(lo - f.x, hi - f.y);
}

/* Two e4m3, the first in the low byte, as f16: exact. */
__device__ static inline uint32_t widen_e4m3(uint32_t pair)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

/* c[16, 8] += a[16, 16] b[16, 8], f16 or bf16 operands. Lane 4g + t has of c the rows g (c[0],
 * c[1]) and g + 8 (c[2], c[3]), columns 2t and 2t + 1; of a the same rows (a[0], a[1]), columns 2t
 * and 2t + 1, and 8 columns on (a[2], a[3]); of b the rows 2t, 2t + 1 (b0) and 8 on (b1), column
 * g. */
template <bool BF>
__device__ static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (BF)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Over the four lanes that share rows of c. */
__device__ static inline float quad_max(float v)
{
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, 2));
}

__device__ static inline float quad_sum(float v)
{
    v += __shfl_xor_sync(0xFFFFFFFF, v, 1);
    return v + __shfl_xor_sync(0xFFFFFFFF, v, 2);
}

__device__ static inline uint32_t shared_at(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void load_shared(uint32_t w[4], uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Hides where x comes from: what is quickly computed from it is then computed again in each round
 * of a loop, instead of kept in registers that are needed otherwise. */
__device__ static inline int anew(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* ---- few ---- */

#define FEW_WARPS   4
#define FEW_THREADS (32 * FEW_WARPS)
#define FEW_GROUP   8 /* query heads of a key: the rows of a product, see few_query */
/* Weights are 2^FEW_LIFT for the largest score: the smaller ones keep their digits in f16. */
#define FEW_LIFT 6.0f

/* How a warp divides a step of KEYS keys. Of a key's row lane 4g + t of its column g reads VEC
 * elements at a time, t-th of four; of a value's row, g-th of eight. The order of the elements of
 * a product's sum is free, as long as q has the same, and so is the order of the columns of y. */
template <int D, enum nbi_dtype TYPE>
struct few {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_E4M3 ? 1 : 2;
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

template <int WORDS> __device__ static inline void load_words(uint32_t *out, const void *p)
{
    if (WORDS == 4) {
        uint4 w = __ldg((const uint4 *)p);
        out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
    } else {
        uint2 w = __ldg((const uint2 *)p);
        out[0] = w.x, out[1] = w.y;
    }
}

/* Keys past the end are taken from the last one: their scores will be masked, and what is read is
 * finite where the row is. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_load_keys(struct few<D, TYPE> &f, const uint8_t *k, int stride,
                                            int key, int end)
{
    using F = struct few<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::KEYS / 8; c++) {
        const uint8_t *row = k + (int64_t)min(key + 8 * c + g, end - 1) * stride + 16 * t;
#pragma unroll
        for (int i = 0; i < F::K_LOADS; i++)
            load_words<4>(f.k[c][i], row + 64 * i);
    }
}

template <int D, enum nbi_dtype TYPE>
__device__ static inline void few_load_values(struct few<D, TYPE> &f, const uint8_t *v, int stride,
                                              int key, int end)
{
    using F = struct few<D, TYPE>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < F::KEYS / 4; c++) {
        int at = key + c / 4 * 16 + c % 4 / 2 * 8 + 2 * t + c % 2;
        const uint8_t *row = v + (int64_t)min(at, end - 1) * stride + F::V_VEC * F::BYTES * g;
#pragma unroll
        for (int i = 0; i < F::V_LOADS; i++)
            load_words<F::V_WORDS>(f.v[c][i], row + 8 * F::V_VEC * F::BYTES * i);
    }
}

/* Where the warps of a CTA meet. */
template <int D> struct few_shared {
    uint4 q[D / 16][32]; /* operands, by lane */
    float y[FEW_WARPS][FEW_GROUP][D];
    float base[FEW_WARPS][FEW_GROUP], sum[FEW_WARPS][FEW_GROUP];
};

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
        load_shared(q, shared_at(&sh.q[i][threadIdx.x % 32]));
#pragma unroll
        for (int c = 0; c < F::KEYS / 8; c++) {
            if (F::BYTES == 1) {
                uint32_t w = f.k[c][i / 4][i % 4];
                mma<F::BF>(acc[c], q, widen_e4m3(w & 0xFFFF), widen_e4m3(w >> 16));
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
                    mma<F::BF>(f.y[4 * i + 2 * e], p, widen_e4m3(b0 & 0xFFFF),
                               widen_e4m3(b1 & 0xFFFF));
                    mma<F::BF>(f.y[4 * i + 2 * e + 1], p, widen_e4m3(b0 >> 16),
                               widen_e4m3(b1 >> 16));
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
    using F = struct few<D, TYPE>;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum = quad_sum(f.sum);
    if (t == 0) {
        sh.base[warp][g] = f.base;
        sh.sum[warp][g] = sum;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int d = i / F::V_VEC * 8 * F::V_VEC + (2 * t + e) * F::V_VEC + i % F::V_VEC;
            sh.y[warp][g][d] = f.y[i][e] + f.y[i][e + 2];
        }
}

/* The warps' results added in order. Some warp had a key, so top is finite. */
template <int D>
__device__ static inline void few_finish(const struct attend &a, struct few_shared<D> &sh,
                                         int64_t head0, int split)
{
    for (int i = threadIdx.x; i < a.group * D; i += FEW_THREADS) {
        int h = i / D, d = i % D;
        float top = sh.base[0][h], sum = 0, acc = 0;
#pragma unroll
        for (int w = 1; w < FEW_WARPS; w++)
            top = fmaxf(top, sh.base[w][h]);
#pragma unroll
        for (int w = 0; w < FEW_WARPS; w++) {
            float weight = fast_exp2(sh.base[w][h] - top);
            sum += weight * sh.sum[w][h];
            acc += weight * sh.y[w][h][d];
        }
        int64_t head = head0 + h;
        if (a.splits > 1)
            part_values(a, head, split)[d] = acc;
        else
            a.y[head * D + d] = acc / sum;
        if (d == 0 && a.splits > 1)
            *part_sums(a, head, split) = make_float2(top, sum);
        else if (d == 0 && a.lse)
            a.lse[head] = (top + log2f(sum)) * LN2;
    }
}

/* Grid: key heads, rows, splits. The warps take steps of the range in turn. */
template <int D, enum nbi_dtype TYPE>
__global__ __launch_bounds__(FEW_THREADS,
                             few<D, TYPE>::CTAS) static void k_attend_few(struct attend a)
{
    using F = struct few<D, TYPE>;
    __shared__ struct few_shared<D> sh;
    int kvh = blockIdx.x, n = blockIdx.y, split = blockIdx.z;
    int64_t head0 = (int64_t)n * a.NH + kvh * a.group;
    int stride = a.NKV * D * F::BYTES;
    struct range r = range_of(a, n, split, F::KEYS);
    if (r.begin >= r.end) { /* only with splits */
        for (int i = threadIdx.x; i < a.group * D; i += FEW_THREADS) {
            part_values(a, head0 + i / D, split)[i % D] = 0;
            if (i % D == 0)
                *part_sums(a, head0 + i / D, split) = make_float2(-INFINITY, 0);
        }
        return;
    }

    const uint8_t *k = a.k + (int64_t)kvh * D * F::BYTES, *v = a.v + (int64_t)kvh * D * F::BYTES;
    const int all = FEW_WARPS * F::KEYS;
    int key = r.begin + threadIdx.x / 32 * F::KEYS;
    F f;
    f.base = -INFINITY;
    f.sum = 0;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            f.y[i][e] = 0;
    few_load_keys(f, k, stride, key, r.end);
    few_query<D, TYPE>(sh, a.q + head0 * D, a.group, a.scale);
    __syncthreads();
    /* Values are on their way while scores are computed, the next keys while values are used. */
    for (; key < r.end; key += all) {
        float s[F::KEYS / 8][2];
        few_load_values(f, v, stride, key, r.end);
        few_scores(f, sh, s);
        if (key + all < r.end)
            few_load_keys(f, k, stride, key + all, r.end);
        few_weights(f, s, r.end - key);
        few_values(f, s);
    }
    few_leave(sh, f);
    __syncthreads();
    few_finish(a, sh, head0, split);
}

/* ---- tiles ---- */

#define TILES_THREADS 128
#define TILES_ROWS    128 /* queries times the heads of a group, 32 for each warp */
#define TILES_KEYS    64

/* Rows of D 16-bit numbers in shared memory, in pieces of 16 bytes; xor keeps those of eight rows
 * in different banks. */
template <int D> __device__ static inline uint32_t piece_at(int row, int piece)
{
    return (uint32_t)(row * D * 2 + ((piece ^ (row & 7)) << 4));
}

/* 16 bytes, or zeros. */
__device__ static inline void copy_16(uint32_t to, const void *from, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

__device__ static inline void copies_done(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

__device__ static inline void store_shared(uint32_t to, const uint32_t w[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

/* Four matrices of 8 x 8; lane l gives the row l % 8 of matrix l / 8. */
__device__ static inline void load_matrices(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

__device__ static inline void load_transposed(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Shared memory: queries, then keys and values of a tile as 16-bit operands. Floats of 16 bits come
 * as they are, and there is room for two tiles; e4m3 comes into a place of its own first, and f32
 * through registers. */
template <int D, enum nbi_dtype TYPE>
struct tiles {
    static constexpr bool BF = TYPE == NBI_BF16;
    static constexpr int BYTES = TYPE == NBI_F32    ? 4
                                 : TYPE == NBI_E4M3 ? 1
                                                    : 2;
    static constexpr bool DIRECT = BYTES == 2;
    static constexpr int QUERIES = TILES_ROWS * D * 2;
    static constexpr int ONE = TILES_KEYS * D * 2; /* keys of a tile; the values follow */
    static constexpr int RAW = TYPE == NBI_E4M3 ? TILES_KEYS * D : 0;
    static constexpr int SHARED = QUERIES + 2 * ONE * (DIRECT ? 2 : 1) + 2 * RAW;
};

/* Queries from to to - 1: their first key is lo for all; the first of them sees keys up to last,
 * each other one more, up to hi. Kept in shared memory, since registers are short. */
struct tiles_run {
    int from, to, last, lo, hi;
    int open;   /* up to here all rows of the tile see all keys */
    int n0, n1; /* queries of the tile, those of other runs included */
};

/* Keys and values of a head, and where they go. */
struct tiles_source {
    const uint8_t *k, *v; /* row 0 of the store */
    int stride;           /* bytes */
    uint32_t shared;      /* after the queries */
    const struct tiles_run *run;
};

/* Starts the copy of tile i. Keys past hi become zeros. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline void tiles_fetch(const struct tiles_source &src, int i)
{
    using T = struct tiles<D, TYPE>;
    constexpr int PIECES = D * T::BYTES / 16; /* of a row */
    if (T::BYTES == 4)
        return;
    uint32_t to = src.shared + (T::DIRECT ? (i & 1) * 2 * T::ONE : 2 * T::ONE);
    int thread = anew(threadIdx.x), key0 = src.run->lo + i * TILES_KEYS, hi = src.run->hi;
#pragma unroll 4
    for (int j = 0; j < TILES_KEYS * PIECES / TILES_THREADS; j++) {
        int at = thread + j * TILES_THREADS, row = at / PIECES, piece = at % PIECES;
        bool real = key0 + row <= hi;
        int64_t from = (int64_t)min(key0 + row, hi) * src.stride + piece * 16;
        uint32_t place = T::DIRECT ? piece_at<D>(row, piece) : (uint32_t)at * 16;
        copy_16(to + place, src.k + from, real);
        copy_16(to + place + (T::DIRECT ? T::ONE : T::RAW), src.v + from, real);
    }
}

/* e4m3 in shared memory, keys and values behind them, to f16. */
template <int D> __device__ static inline void tiles_widen(uint32_t to, uint32_t from)
{
    int thread = anew(threadIdx.x);
#pragma unroll 2
    for (int j = 0; j < 2 * TILES_KEYS * D / 16 / TILES_THREADS; j++) {
        int at = thread + j * TILES_THREADS, row = at / (D / 16), piece = at % (D / 16);
        uint32_t raw[4];
        load_shared(raw, from + at * 16);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = widen_e4m3(raw[2 * e + i / 2] >> (i % 2 * 16) & 0xFFFF);
            store_shared(to + piece_at<D>(row, 2 * piece + e), w);
        }
    }
}

/* Eight floats times a factor as a piece. */
template <bool BF> __device__ static inline void store_floats(uint32_t to, const float *p, float by)
{
    float4 x[2] = {__ldg((const float4 *)p), __ldg((const float4 *)p + 1)};
    float f[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] *= by;
        if (!BF)
            f[i] = fit_f16(f[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = pack<BF>(f[2 * i], f[2 * i + 1]);
    store_shared(to, w);
}

/* f32 of tile i, keys and values, to f16. */
template <int D> __device__ static inline void tiles_narrow(const struct tiles_source &src, int i)
{
    constexpr int ONE = tiles<D, NBI_F32>::ONE;
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 2
    for (int j = 0; j < TILES_KEYS * D / 8 / TILES_THREADS; j++) {
        int at = threadIdx.x + j * TILES_THREADS, row = at / (D / 8), piece = at % (D / 8);
        int key = src.run->lo + i * TILES_KEYS + row;
        uint32_t to = src.shared + piece_at<D>(row, piece);
        if (key <= src.run->hi) {
            int64_t from = (int64_t)key * src.stride + piece * 32;
            store_floats<false>(to, (const float *)(src.k + from), 1);
            store_floats<false>(to + ONE, (const float *)(src.v + from), 1);
        } else {
            store_shared(to, zeros);
            store_shared(to + ONE, zeros);
        }
    }
}

/* Waits for tile i of `count`, starts the next and says where the keys are. */
template <int D, enum nbi_dtype TYPE>
__device__ static inline uint32_t tiles_next(const struct tiles_source &src, int i, int count)
{
    using T = struct tiles<D, TYPE>;
    copies_done();
    __syncthreads(); /* tile i is there, and nobody uses the one before any more */
    if (TYPE == NBI_E4M3) {
        tiles_widen<D>(src.shared, src.shared + 2 * T::ONE);
    } else if (TYPE == NBI_F32) {
        tiles_narrow<D>(src, i);
    }
    if (!T::DIRECT)
        __syncthreads();
    if (i + 1 < count)
        tiles_fetch<D, TYPE>(src, i + 1);
    return src.shared + (T::DIRECT ? (i & 1) * 2 * T::ONE : 0);
}

/* A lane's share of its warp's 32 rows: those of two products, 16 m + 8 e + g each. */
template <int D> struct tiles_rows {
    float y[2][D / 8][4];
    float base[2][2], sum[2][2];
};

/* Scores of the warp's rows with the keys of a tile. */
template <int D, bool BF>
__device__ static inline void tiles_scores(float s[2][TILES_KEYS / 8][4], uint32_t queries,
                                           uint32_t keys)
{
    int thread = anew(threadIdx.x), lane = thread % 32;
    int q_row = thread / 32 * 32 + lane % 16, q_piece = lane / 16;
    int k_row = lane % 8 + lane / 16 * 8, k_piece = lane / 8 % 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int c = 0; c < TILES_KEYS / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][c][e] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t q[2][4], k[4];
        load_matrices(q[0], queries + piece_at<D>(q_row, 2 * i + q_piece));
        load_matrices(q[1], queries + piece_at<D>(q_row, 2 * i + q_piece) + 16 * D * 2);
#pragma unroll
        for (int c = 0; c < TILES_KEYS / 16; c++) {
            load_matrices(k, keys + piece_at<D>(k_row, 2 * i + k_piece) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(s[m][2 * c], q[m], k[0], k[1]);
                mma<BF>(s[m][2 * c + 1], q[m], k[2], k[3]);
            }
        }
    }
}

/* The rows of a lane, as packed rows of the call: query first, head of the group second. */
__device__ static inline int tiles_row(int row0, int m, int e)
{
    return row0 + (int)threadIdx.x / 32 * 32 + 16 * m + 8 * e + (int)threadIdx.x % 32 / 4;
}

/* Key0 is the first of the tile. Rows that are not of the run see nothing. */
__device__ static inline void tiles_mask(float s[2][TILES_KEYS / 8][4], const struct tiles_run &run,
                                         int row0, int group, int key0)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int n = tiles_row(row0, m, e / 2) / group;
            int limit = n >= run.from && n < run.to ? run.last + n - run.from : -1;
#pragma unroll
            for (int c = 0; c < TILES_KEYS / 8; c++)
                if (key0 + 8 * c + 2 * t + e % 2 > limit)
                    s[m][c][e] = -INFINITY;
        }
}

/* Scores become weights, and what was summed so far is scaled where the base moved. */
template <int D>
__device__ static inline void tiles_weights(float s[2][TILES_KEYS / 8][4], struct tiles_rows<D> &r)
{
    float keep[2][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float top = fmaxf(s[m][0][2 * e], s[m][0][2 * e + 1]);
#pragma unroll
            for (int c = 1; c < TILES_KEYS / 8; c++)
                top = fmaxf(top, fmaxf(s[m][c][2 * e], s[m][c][2 * e + 1]));
            top = quad_max(top);
            keep[m][e] = 1;
            if (top > r.base[m][e] + LAG) {
                keep[m][e] = fast_exp2(r.base[m][e] - top);
                r.base[m][e] = top;
                moved = true;
            }
            /* A row without keys so far has nothing to subtract. */
            float base = r.base[m][e] == -INFINITY ? 0 : r.base[m][e], sum = 0;
#pragma unroll
            for (int c = 0; c < TILES_KEYS / 8; c++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    s[m][c][2 * e + i] = fast_exp2(s[m][c][2 * e + i] - base);
                    sum += s[m][c][2 * e + i];
                }
            r.sum[m][e] = r.sum[m][e] * keep[m][e] + sum;
        }
    if (__any_sync(0xFFFFFFFF, moved)) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    r.y[m][i][e] *= keep[m][e / 2];
    }
}

/* y += weights times the values of a tile. */
template <int D, bool BF>
__device__ static inline void tiles_values(struct tiles_rows<D> &r,
                                           const float s[2][TILES_KEYS / 8][4], uint32_t values)
{
    int lane = anew(threadIdx.x % 32), row = lane % 16, piece = lane / 16;
#pragma unroll
    for (int c = 0; c < TILES_KEYS / 16; c++) {
        uint32_t p[2][4], v[4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *w = s[m][2 * c + i / 2] + i % 2 * 2;
                p[m][i] = pack<BF>(w[0], w[1]);
            }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            load_transposed(v, values + piece_at<D>(row, 2 * i + piece) + c * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma<BF>(r.y[m][2 * i], p[m], v[0], v[1]);
                mma<BF>(r.y[m][2 * i + 1], p[m], v[2], v[3]);
            }
        }
    }
}

/* Packed rows: query first, head of the group second. */
template <int D, bool BF>
__device__ static inline void tiles_load_queries(const struct attend &a, uint32_t to, int row0,
                                                 int kvh)
{
#pragma unroll 4
    for (int j = 0; j < TILES_ROWS * D / 8 / TILES_THREADS; j++) {
        int at = threadIdx.x + j * TILES_THREADS, row = at / (D / 8), piece = at % (D / 8);
        int n = (row0 + row) / a.group, h = kvh * a.group + (row0 + row) % a.group;
        const uint32_t zeros[4] = {0, 0, 0, 0};
        if (n < a.N)
            store_floats<BF>(to + piece_at<D>(row, piece),
                             a.q + ((int64_t)n * a.NH + h) * D + piece * 8, a.scale);
        else
            store_shared(to + piece_at<D>(row, piece), zeros);
    }
}

template <int D>
__device__ static inline void tiles_store(const struct attend &a, struct tiles_rows<D> &r, int row0,
                                          int kvh)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = tiles_row(row0, m, e), n = row / a.group;
            float sum = quad_sum(r.sum[m][e]), by = 1 / sum;
            if (n >= a.N)
                continue;
            int64_t head = (int64_t)n * a.NH + kvh * a.group + row % a.group;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                *(float2 *)(a.y + head * D + 8 * i + 2 * t) =
                    make_float2(r.y[m][i][2 * e] * by, r.y[m][i][2 * e + 1] * by);
            if (a.lse && t == 0)
                a.lse[head] = (r.base[m][e] + log2f(sum)) * LN2;
        }
}

/* Of the queries n0 to n0 + count - 1: bit i of breaks is set where query n0 + i does not simply
 * go on from the one before with one key more. Count is at most 128, one for each thread. */
__device__ static inline void tiles_breaks(const struct attend &a, uint32_t breaks[4], int n0,
                                           int count)
{
    int i = threadIdx.x, n = n0 + i;
    bool cut =
        i > 0 && i < count && (a.first[n] != a.first[n - 1] || a.last[n] != a.last[n - 1] + 1);
    uint32_t word = __ballot_sync(0xFFFFFFFF, cut);
    if (i % 32 == 0)
        breaks[i / 32] = word;
    __syncthreads();
}

/* The run that begins at query `from` of the tile. */
__device__ static inline void tiles_run_at(struct tiles_run &run, const struct attend &a,
                                           const uint32_t breaks[4], int from)
{
    int count = run.n1 - run.n0 + 1, to = count;
    for (int i = from - run.n0 + 1; i < count; i = (i / 32 + 1) * 32) {
        uint32_t word = breaks[i / 32] >> (i % 32);
        if (word) {
            to = i + __ffs((int)word) - 1;
            break;
        }
    }
    run.from = from;
    run.to = run.n0 + to;
    run.last = a.last[from];
    run.lo = a.first[from];
    run.hi = run.last + run.to - 1 - from;
    run.open = from == run.n0 && to == count ? run.last : -1;
}

/* Grid: tiles of rows, the last first since they see the most keys, and for each the key heads.
 *
 * A tile's queries are taken in runs with the same first key and one key more for each: all keys
 * from first to the last query's last are then somebody's, hence written. Usually there is one
 * run. Rows that are not of the run keep what they have. */
template <int D, enum nbi_dtype TYPE>
__global__ __launch_bounds__(TILES_THREADS, 2) static void k_attend_tiles(struct attend a)
{
    using T = struct tiles<D, TYPE>;
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint32_t breaks[4];
    __shared__ struct tiles_run run;
    int kvh = blockIdx.x % a.NKV, row0 = ((gridDim.x - 1 - blockIdx.x) / a.NKV) * TILES_ROWS;
    int n0 = row0 / a.group, n1 = min((row0 + TILES_ROWS - 1) / a.group, a.N - 1);
    int64_t head = (int64_t)kvh * D * T::BYTES;
    uint32_t queries = shared_at(smem);
    struct tiles_source src = {};
    src.k = a.k + head;
    src.v = a.v + head;
    src.stride = a.NKV * D * T::BYTES;
    src.shared = queries + T::QUERIES;
    src.run = &run;

    tiles_load_queries<D, T::BF>(a, queries, row0, kvh);
    if (threadIdx.x == 0) {
        run.n0 = n0;
        run.n1 = n1;
    }
    tiles_breaks(a, breaks, n0, n1 - n0 + 1);
    struct tiles_rows<D> r;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            r.base[m][e] = -INFINITY;
            r.sum[m][e] = 0;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                r.y[m][i][2 * e] = r.y[m][i][2 * e + 1] = 0;
        }

    for (int from = n0; from <= run.n1; from = run.to) {
        __syncthreads(); /* the run before is done */
        if (threadIdx.x == 0)
            tiles_run_at(run, a, breaks, from);
        __syncthreads();
        int count = (run.hi - run.lo) / TILES_KEYS + 1;
        tiles_fetch<D, TYPE>(src, 0);
        for (int i = 0; i < count; i++) {
            float s[2][TILES_KEYS / 8][4];
            uint32_t keys = tiles_next<D, TYPE>(src, i, count);
            int key0 = run.lo + i * TILES_KEYS;
            tiles_scores<D, T::BF>(s, queries, keys);
            if (key0 + TILES_KEYS - 1 > run.open)
                tiles_mask(s, run, row0, a.group, key0);
            tiles_weights<D>(s, r);
            tiles_values<D, T::BF>(r, s, keys + T::ONE);
        }
    }
    tiles_store<D>(a, r, row0, anew(blockIdx.x) % a.NKV);
}

/* ---- which, and how many ---- */

int64_t nbi_cuda_attend_bytes(const struct cuda *cuda, const struct nbi_stream_limits *limits)
{
    (void)cuda;
    int64_t rows = limits->N < FEW_ROWS ? limits->N : FEW_ROWS;
    int64_t bytes = rows * limits->heads * SPLITS_MAX * (limits->D + 2) * (int64_t)sizeof(float);
    return bytes < PARTS_BYTES ? bytes : PARTS_BYTES;
}

/* Splits for `pairs` CTAs of which the card holds `slots` at once, with at least `least` keys each.
 * One row gets one wave of CTAs; several, which may differ in length, up to four. */
static int splits_for(const struct nbi_stream *s, const struct nbi_op_attention *a, int64_t pairs,
                      int64_t slots, int64_t least)
{
    int64_t splits = slots / pairs;
    if (a->N > 1) {
        int64_t more = 4 * slots / pairs, long_enough = a->longest / 512;
        more = more < long_enough ? more : long_enough;
        splits = splits > more ? splits : more;
    }
    int64_t part = a->N * a->NH * (a->D + 2) * (int64_t)sizeof(float);
    int64_t fit = nbi_cuda_attend_bytes(s->cuda, &s->limits) / part;
    int64_t useful = ceil_div(a->longest, least);
    splits = splits < useful ? splits : useful;
    splits = splits < fit ? splits : fit;
    splits = splits < SPLITS_MAX ? splits : SPLITS_MAX;
    return splits > 1 ? (int)splits : 1;
}

static enum nb_status combine(struct nbi_stream *s, const struct attend &k)
{
    if (k.splits == 1)
        return NB_OK;
    k_attend_combine<<<dim3(k.N, k.NH), PLAIN_THREADS, 0, s->queue>>>(k);
    CU_LAUNCHED();
    return NB_OK;
}

static enum nb_status attend_plain(struct nbi_stream *s, const struct nbi_op_attention *a,
                                   struct attend k)
{
    if (a->N <= FEW_ROWS)
        k.splits = splits_for(s, a, a->N * a->NH, (int64_t)s->cuda->sms * 8, 2 * PLAIN_KEYS);
    dim3 grid(k.N, k.NH, k.splits);
    switch (a->store.dtype) {
    case NBI_F32:
        k_attend_plain<NBI_F32><<<grid, PLAIN_THREADS, 0, s->queue>>>(k);
        break;
    case NBI_F16:
        k_attend_plain<NBI_F16><<<grid, PLAIN_THREADS, 0, s->queue>>>(k);
        break;
    case NBI_BF16:
        k_attend_plain<NBI_BF16><<<grid, PLAIN_THREADS, 0, s->queue>>>(k);
        break;
    default:
        k_attend_plain<NBI_E4M3><<<grid, PLAIN_THREADS, 0, s->queue>>>(k);
    }
    CU_LAUNCHED();
    return combine(s, k);
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                 struct attend k)
{
    using F = struct few<D, TYPE>;
    k.splits =
        splits_for(s, a, a->N * a->NKV, (int64_t)s->cuda->sms * F::CTAS, FEW_WARPS * F::KEYS);
    k_attend_few<D, TYPE><<<dim3(k.NKV, k.N, k.splits), FEW_THREADS, 0, s->queue>>>(k);
    CU_LAUNCHED();
    return combine(s, k);
}

template <int D>
static enum nb_status attend_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                 const struct attend &k)
{
    switch (a->store.dtype) {
    case NBI_F16:
        return launch_few<D, NBI_F16>(s, a, k);
    case NBI_BF16:
        return launch_few<D, NBI_BF16>(s, a, k);
    default:
        return launch_few<D, NBI_E4M3>(s, a, k);
    }
}

template <int D, enum nbi_dtype TYPE>
static enum nb_status launch_tiles(struct nbi_stream *s, const struct attend &k)
{
    int shared = tiles<D, TYPE>::SHARED;
    CU_TRY(cudaFuncSetAttribute(k_attend_tiles<D, TYPE>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int64_t grid = ceil_div((int64_t)k.N * k.group, TILES_ROWS) * k.NKV;
    k_attend_tiles<D, TYPE><<<(unsigned)grid, TILES_THREADS, shared, s->queue>>>(k);
    CU_LAUNCHED();
    return NB_OK;
}

template <int D>
static enum nb_status attend_tiles(struct nbi_stream *s, const struct nbi_op_attention *a,
                                   const struct attend &k)
{
    switch (a->store.dtype) {
    case NBI_F32:
        return launch_tiles<D, NBI_F32>(s, k);
    case NBI_F16:
        return launch_tiles<D, NBI_F16>(s, k);
    case NBI_BF16:
        return launch_tiles<D, NBI_BF16>(s, k);
    default:
        return launch_tiles<D, NBI_E4M3>(s, k);
    }
}

enum nb_status nbi_cuda_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    CU_HERE(s);
    if (a->N == 0)
        return NB_OK;
    struct attend k = {};
    k.y = at<float>(a->y);
    k.lse = at<float>(a->lse);
    k.q = at<const float>(a->q);
    k.k = at<const uint8_t>(a->store.k);
    k.v = at<const uint8_t>(a->store.v);
    k.first = at<const int32_t>(a->first);
    k.last = at<const int32_t>(a->last);
    k.parts = s->attend;
    k.N = (int)a->N;
    k.NH = (int)a->NH;
    k.NKV = (int)a->NKV;
    k.D = (int)a->D;
    k.group = (int)(a->NH / a->NKV);
    k.splits = 1;
    k.scale = LOG2E / sqrtf((float)a->D);

    bool cores = !a->exact && (a->D == 128 || a->D == 64);
    if (cores && a->N > FEW_ROWS)
        return a->D == 128 ? attend_tiles<128>(s, a, k) : attend_tiles<64>(s, a, k);
    if (cores && a->store.dtype != NBI_F32 && k.group <= FEW_GROUP)
        return a->D == 128 ? attend_few<128>(s, a, k) : attend_few<64>(s, a, k);
    return attend_plain(s, a, k);
}
