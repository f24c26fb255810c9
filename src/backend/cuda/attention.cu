/* attention.cu - softmax(q k^T / sqrt(D)) v over a cache.
 *
 * in : q of N rows, keys and values of a store, a range of its rows for each row of q
 * out: y, and the logarithm of each denominator if asked
 *
 * Three methods. "Plain" takes any shape in f32, one query head a CTA. "Few" is for decoding: the
 * query heads that share a key are the rows of a tensor core product, so each key and value is
 * read once, from global memory straight into operands. "Tiles" is for prompts: 128 rows of
 * queries against tiles of 64 keys in shared memory. Plain and few divide a long range among CTAs;
 * each leaves a part (maximum, sum, weighted values), and a second kernel adds them in order. */
#include "backend/cuda/attention.cuh"

#define FEW_ROWS    64 /* N up to which a call counts as decoding */
#define SPLITS_MAX  256
#define PARTS_BYTES ((int64_t)16 << 20)

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
        return nbi_cuda_attend_tiles(s, a, k);
    if (cores && a->store.dtype != NBI_F32 && k.group <= FEW_GROUP)
        return a->D == 128 ? attend_few<128>(s, a, k) : attend_few<64>(s, a, k);
    return attend_plain(s, a, k);
}
