/* attention.cu - softmax(q k^T / sqrt(D)) v over a cache.
 *
 * in : q of N rows, keys and values of a store, a range of its rows for each row of q
 * out: y, and the logarithm of each denominator if asked
 *
 * Three methods. "Plain" takes any shape in f32, one query head a CTA. "Few" is for decoding: the
 * query heads that share a key are the rows of a tensor core product, so each key and value is
 * read once, from global memory straight into operands. "Tiles" is for prompts: 128 rows of
 * queries against tiles of 64 keys in shared memory. Plain and few divide a long range among CTAs;
 * each leaves a part (maximum, sum, weighted values), and those are added in order: of plain by a
 * second kernel. Pages are of as many keys as all of them take at a time. */
#include "backend/cuda/attention.cuh"

#define PARTS_BYTES ((int64_t)16 << 20) /* for parts, unless steady calls want more */

struct range {
    int begin, end;
};

__device__ static inline int splits_of(const struct attend &a, int n)
{
    int count = a.last[n] - a.first[n] + 1;
    return a.batch_invariant && a.splits > 1 ? (count - 1) / steady_piece(count) + 1 : a.splits;
}

/* What split z of row n has of its range, in whole steps. May be empty. */
__device__ static inline struct range range_of(const struct attend &a, int n, int z, int step)
{
    int first = a.first[n], end = a.last[n] + 1, splits = splits_of(a, n);
    int each = (end - first + splits - 1) / splits;
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
    int splits = splits_of(a, blockIdx.x);
    int64_t head = (int64_t)blockIdx.x * a.NH + blockIdx.y;
    const float2 *sums = part_sums(a, head, 0);
    if (threadIdx.x < 32) {
        float top = -INFINITY, sum = 0;
        for (int z = threadIdx.x; z < splits; z += 32)
            top = fmaxf(top, sums[z].x);
        top = warp_max(top);
        for (int z = threadIdx.x; z < splits; z += 32) {
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
        for (int z = 0; z < splits; z++)
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
    if (split >= splits_of(a, n))
        return;
    const int32_t *pages = a.pages ? a.pages + a.tables[n] : NULL;
    for (int d = threadIdx.x; d < D; d += PLAIN_THREADS)
        q[d] = a.q[head * D + d] * a.scale;

    float acc[PLAIN_EACH] = {0}, top = -INFINITY, sum = 0;
    for (int key = r.begin; key < r.end; key += PLAIN_KEYS) {
        int count = min(PLAIN_KEYS, r.end - key), row = key + page_shift(pages, key);
        __syncthreads(); /* q is there; the weights of the block before were used */
        for (int i = threadIdx.x / 32; i < count; i += PLAIN_THREADS / 32) {
            int64_t at = at0 + (row + i) * stride;
            float s = 0;
            for (int d = threadIdx.x % 32; d < D; d += 32)
                s += q[d] * load_f32(a.k, at + d, TYPE);
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
                part += score[i] * load_f32(a.v, at0 + (row + i) * stride + d, TYPE);
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

/* ---- which, and how many ---- */

int64_t nbi_cuda_attention_bytes(const struct cuda *cuda, const struct nbi_stream_limits *limits)
{
    (void)cuda;
    int64_t rows = limits->N < NBI_DECODE_ATTENTION_ROWS ? limits->N : NBI_DECODE_ATTENTION_ROWS;
    int64_t each = rows * limits->heads * (limits->D + 2) * (int64_t)sizeof(float);
    int64_t least = each * STEADY_SPLITS > PARTS_BYTES ? each * STEADY_SPLITS : PARTS_BYTES;
    return each * SPLITS_MAX < least ? each * SPLITS_MAX : least;
}

/* Splits for `pairs` CTAs of which the card holds `slots` at once, with at least `least` keys each.
 * One row gets one wave of CTAs; several, which may differ in length, up to four. */
static int splits_for(const struct nbi_stream *s, const struct nbi_op_attention *a, int64_t pairs,
                      int64_t slots, int64_t least)
{
    int64_t splits = slots / pairs, batch_invariant = ceil_div(a->max_keys, STEADY_KEYS);
    if (a->batch_invariant) /* the most that a row can have */
        return batch_invariant < STEADY_SPLITS ? (int)batch_invariant : STEADY_SPLITS;
    if (a->N > 1) {
        int64_t more = 4 * slots / pairs, long_enough = a->max_keys / 512;
        more = more < long_enough ? more : long_enough;
        splits = splits > more ? splits : more;
    }
    int64_t part = a->N * a->NH * (a->D + 2) * (int64_t)sizeof(float);
    int64_t fit = nbi_cuda_attention_bytes(s->cuda, &s->limits) / part;
    int64_t useful = ceil_div(a->max_keys, least);
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
    if (a->N <= NBI_DECODE_ATTENTION_ROWS)
        k.splits = splits_for(s, a, a->N * a->NH, (int64_t)s->cuda->sms * 8, 2 * PLAIN_KEYS);
    dim3 grid(k.N, k.NH, k.splits);
    switch (a->kv.dtype) {
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

/* Rows that have nothing in common, as many at a time as count as few. */
static enum nb_status attend_in_turn(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    int64_t row = a->NH * a->D * (int64_t)sizeof(float), head = a->NH * (int64_t)sizeof(float);
    for (int64_t n = 0; n < a->N; n += NBI_DECODE_ATTENTION_ROWS) {
        struct nbi_op_attention part = *a;
        struct nbi_ptr *indices[] = {&part.first, &part.last, &part.tables};
        part.N = a->N - n < NBI_DECODE_ATTENTION_ROWS ? a->N - n : NBI_DECODE_ATTENTION_ROWS;
        part.y = nbi_ptr_add(a->y, n * row);
        part.q = nbi_ptr_add(a->q, n * row);
        if (a->lse.at)
            part.lse = nbi_ptr_add(a->lse, n * head);
        for (int i = 0; i < 3; i++)
            *indices[i] = nbi_ptr_add(*indices[i], n * (int64_t)sizeof(int32_t));
        NBI_TRY(nbi_cuda_attention(s, &part));
    }
    return NB_OK;
}

/* By attend_few.cu. */
static bool is_decode_attention(const struct nbi_op_attention *a)
{
    return !a->exact && (a->D == 128 || a->D == 64) && a->N <= NBI_DECODE_ATTENTION_ROWS &&
           a->kv.dtype != NBI_F32 && a->NH / a->NKV <= FEW_GROUP;
}

enum nb_status nbi_cuda_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    struct rope_args rope = s->rope;
    if (is_decode_attention(a) && a->one_row_per_sequence && rope.N == a->N &&
        rope.q_out == at<float>(a->q) && rope.k_cache == at<void>(a->kv.k)) {
        NBI_BUG_IF(rope.NH != a->NH || rope.NKV != a->NKV || rope.D != a->D ||
                   rope.kv_type != a->kv.dtype);
        s->rope = {}; /* it is taken along */
    } else {
        rope = {};
    }
    CU_HERE(s);
    if (a->N == 0)
        return NB_OK;
    if (a->kv_unshared && a->N > NBI_DECODE_ATTENTION_ROWS)
        return attend_in_turn(s, a);
    struct attend k = {};
    k.y = at<float>(a->y);
    k.lse = at<float>(a->lse);
    k.q = at<const float>(a->q);
    k.k = at<const uint8_t>(a->kv.k);
    k.v = at<const uint8_t>(a->kv.v);
    k.first = at<const int32_t>(a->first);
    k.last = at<const int32_t>(a->last);
    k.pages = at<const int32_t>(a->pages);
    k.tables = at<const int32_t>(a->tables);
    k.parts = s->attention_partials;
    k.left = s->attention_counters;
    k.N = (int)a->N;
    k.NH = (int)a->NH;
    k.NKV = (int)a->NKV;
    k.D = (int)a->D;
    k.group = (int)(a->NH / a->NKV);
    k.splits = 1;
    k.batch_invariant = a->batch_invariant;
    k.scale = LOG2E / sqrtf((float)a->D);

    if (is_decode_attention(a))
        return nbi_cuda_attend_few(s, a, k, rope);
    if (!a->exact && (a->D == 128 || a->D == 64) && a->N > NBI_DECODE_ATTENTION_ROWS)
        return nbi_cuda_attend_tiles(s, a, k);
    return attend_plain(s, a, k);
}
