/* attention.cu - softmax(q k^T / sqrt(D)) v over a KV cache: the choice of a kernel, and the
 * generic kernel in f32.
 *
 * in : q of N rows, keys and values, and for each row of q a range of keys
 * out: y, and the logarithm of each denominator if asked
 *
 *   decode    attention_decode.cu   up to NBI_DECODE_ATTENTION_ROWS rows on tensor cores
 *   prefill   attention_prefill.cu  more rows on tensor cores
 *   generic   here                  any shape and type, one query head a CTA
 *
 * In training q and y may be bf16, as the keys and values are: any number of rows then takes the
 * prefill kernel or the generic one.
 *
 * Decode and generic split the keys of a row over CTAs (flash decoding). Each split leaves
 *
 *   m = max(s), l = sum(2^(s - m)), acc = sum(2^(s - m) v)       over its keys, with scores s
 *
 * and these partials are merged in the order of the splits: with M = max of all m,
 * y = sum(2^(m - M) acc) / sum(2^(m - M) l). A second kernel does that for generic; for decode it
 * is the CTA that finishes last. A page has as many keys as any kernel takes at a time. */
#include "backend/cuda/attention.cuh"

struct range {
    int begin, end;
};

__device__ static inline int splits_of(const struct attention_args &a, int n)
{
    int count = a.last[n] - a.first[n] + 1;
    return a.batch_invariant && a.splits > 1 ? (count - 1) / invariant_split_keys(count) + 1
                                             : a.splits;
}

/* Keys of split z of row n, a multiple of `step` except for the last. May be empty. */
__device__ static inline struct range split_range(const struct attention_args &a, int n, int z,
                                                  int step)
{
    int first = a.first[n], end = a.last[n] + 1, splits = splits_of(a, n);
    int keys = (end - first + splits - 1) / splits;
    keys = (keys + step - 1) / step * step;
    /* In 64 bits, since z * keys may exceed an int. */
    int64_t begin = (int64_t)first + (int64_t)z * keys;
    if (begin >= end)
        return {end, end};
    return {(int)begin, (int)min(begin + keys, (int64_t)end)};
}

__device__ static inline float *partial_values(const struct attention_args &a, int64_t head,
                                               int split)
{
    return a.partials + (head * a.splits + split) * a.D;
}

__device__ static inline float2 *partial_sums(const struct attention_args &a, int64_t head,
                                              int split)
{
    return (float2 *)(a.partials + (int64_t)a.N * a.NH * a.splits * a.D) + head * a.splits + split;
}

/* ---- merging splits ---- */

#define GENERIC_THREADS 128

/* y of one query head. */
__global__
__launch_bounds__(GENERIC_THREADS) static void k_attention_merge_splits(struct attention_args a)
{
    __shared__ float weight[NBI_SPLITS_MAX], total;
    int splits = splits_of(a, blockIdx.x);
    int64_t head = (int64_t)blockIdx.x * a.NH + blockIdx.y;
    const float2 *sums = partial_sums(a, head, 0);
    if (threadIdx.x < 32) {
        float row_max = -INFINITY, sum = 0;
        for (int z = threadIdx.x; z < splits; z += 32)
            row_max = fmaxf(row_max, sums[z].x);
        row_max = warp_max(row_max);
        for (int z = threadIdx.x; z < splits; z += 32) {
            float w = exp2f(sums[z].x - row_max);
            weight[z] = w;
            sum += w * sums[z].y;
        }
        sum = warp_sum(sum);
        if (threadIdx.x == 0) {
            total = sum;
            if (a.lse)
                a.lse[head] = (row_max + log2f(sum)) * LN2;
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < a.D; d += GENERIC_THREADS) {
        const float *values = partial_values(a, head, 0) + d;
        float acc = 0;
#pragma unroll 8
        for (int z = 0; z < splits; z++)
            acc += weight[z] * values[(int64_t)z * a.D];
        a.y[head * a.D + d] = acc / total;
    }
}

/* ---- generic ---- */

#define GENERIC_KEYS   64
#define GENERIC_VALUES (NBI_HEAD_MAX / GENERIC_THREADS) /* of y, a thread */

/* Online softmax over a block of scores, which become weights. Updates the running maximum and sum
 * and returns the factor for what was accumulated before. All warps compute the same; the first one
 * stores the weights. */
__device__ static inline float softmax_step(float *score, int count, float *row_max, float *sum)
{
    int lane = threadIdx.x % 32;
    float s0 = lane < count ? score[lane] : -INFINITY;
    float s1 = lane + 32 < count ? score[lane + 32] : -INFINITY;
    float new_max = fmaxf(*row_max, warp_max(fmaxf(s0, s1)));
    float rescale = exp2f(*row_max - new_max), p0 = exp2f(s0 - new_max), p1 = exp2f(s1 - new_max);
    *row_max = new_max;
    *sum = *sum * rescale + warp_sum(p0 + p1);
    __syncthreads(); /* all warps have read the scores */
    if (threadIdx.x < 32) {
        score[lane] = p0;
        score[lane + 32] = p1;
    }
    __syncthreads();
    return rescale;
}

/* With BF16, q and y are bf16 and keys are not split. */
template <enum nbi_dtype TYPE, bool BF16>
__global__
__launch_bounds__(GENERIC_THREADS) static void k_attention_cta_per_head(struct attention_args a)
{
    __shared__ float q[NBI_HEAD_MAX], score[GENERIC_KEYS];
    int n = blockIdx.x, h = blockIdx.y, split = blockIdx.z, D = a.D;
    int64_t head = (int64_t)n * a.NH + h, stride = (int64_t)a.NKV * D;
    int64_t at0 = (int64_t)(h / a.group) * D;
    struct range r = split_range(a, n, split, GENERIC_KEYS);
    if (split >= splits_of(a, n))
        return;
    const int32_t *pages = a.pages ? a.pages + a.tables[n] : NULL;
    for (int d = threadIdx.x; d < D; d += GENERIC_THREADS)
        q[d] = load_f32(a.q, head * D + d, BF16 ? NBI_BF16 : NBI_F32) * a.scale;

    float acc[GENERIC_VALUES] = {0}, row_max = -INFINITY, sum = 0;
    for (int key = r.begin; key < r.end; key += GENERIC_KEYS) {
        int count = min(GENERIC_KEYS, r.end - key), row = key + page_offset(pages, key);
        __syncthreads(); /* q is stored; the weights of the previous block were read */
        for (int i = threadIdx.x / 32; i < count; i += GENERIC_THREADS / 32) {
            int64_t at = at0 + (row + i) * stride;
            float s = 0;
            for (int d = threadIdx.x % 32; d < D; d += 32)
                s += q[d] * load_f32(a.k, at + d, TYPE);
            s = warp_sum(s);
            if (threadIdx.x % 32 == 0)
                score[i] = s;
        }
        __syncthreads();
        float rescale = softmax_step(score, count, &row_max, &sum);
#pragma unroll
        for (int j = 0; j < GENERIC_VALUES; j++) {
            int d = threadIdx.x + j * GENERIC_THREADS;
            if (d >= D)
                break;
            float sum_d = acc[j] * rescale;
#pragma unroll 4
            for (int i = 0; i < count; i++)
                sum_d += score[i] * load_f32(a.v, at0 + (row + i) * stride + d, TYPE);
            acc[j] = sum_d;
        }
    }

    float *y = a.splits > 1 ? partial_values(a, head, split) : a.y + head * D;
#pragma unroll
    for (int j = 0; j < GENERIC_VALUES; j++) {
        int d = threadIdx.x + j * GENERIC_THREADS;
        if (BF16 && d < D)
            store_f32(a.y, head * D + d, NBI_BF16, acc[j] / sum);
        else if (d < D)
            y[d] = a.splits > 1 ? acc[j] : acc[j] / sum;
    }
    if (threadIdx.x == 0 && a.splits > 1)
        *partial_sums(a, head, split) = make_float2(row_max, sum);
    else if (threadIdx.x == 0 && a.lse)
        a.lse[head] = (row_max + log2f(sum)) * LN2;
}

/* ---- the choice of kernel and splits ---- */

/* Splits of each row for a call with `heads` CTAs per split, of which `resident` run at once, with
 * at least `min_keys` keys each. One row gets one wave of CTAs. Several rows, which may differ in
 * length, get up to four waves, so that the last wave wastes less. */
static int choose_splits(const struct nbi_stream *s, const struct nbi_op_attention *a,
                         int64_t heads, int64_t resident, int64_t min_keys)
{
    int64_t splits = resident / heads, invariant = ceil_div(a->max_keys, INVARIANT_SPLIT_KEYS);
    if (a->batch_invariant) /* as many as the longest row has */
        return invariant < NBI_INVARIANT_SPLITS ? (int)invariant : NBI_INVARIANT_SPLITS;
    if (a->N > 1) {
        int64_t waves = 4 * resident / heads, long_enough = a->max_keys / 512;
        waves = waves < long_enough ? waves : long_enough;
        splits = splits > waves ? splits : waves;
    }
    int64_t split_bytes = a->N * a->NH * (a->D + 2) * (int64_t)sizeof(float);
    int64_t fit = nbi_cuda_attention_bytes(&s->limits) / split_bytes;
    int64_t useful = ceil_div(a->max_keys, min_keys);
    splits = splits < useful ? splits : useful;
    splits = splits < fit ? splits : fit;
    splits = splits < NBI_SPLITS_MAX ? splits : NBI_SPLITS_MAX;
    return splits > 1 ? (int)splits : 1;
}

static enum nb_status merge_splits(struct nbi_stream *s, const struct attention_args &k)
{
    if (k.splits == 1)
        return NB_OK;
    CU_LAUNCH(k_attention_merge_splits, dim3(k.N, k.NH), GENERIC_THREADS, 0, s->queue, k);
    CU_LAUNCHED();
    return NB_OK;
}

static enum nb_status attention_generic(struct nbi_stream *s, const struct nbi_op_attention *a,
                                        struct attention_args k)
{
    if (a->N <= NBI_DECODE_ATTENTION_ROWS && !a->bf16)
        k.splits = choose_splits(s, a, a->N * a->NH, (int64_t)s->cuda->sms * 8, 2 * GENERIC_KEYS);
    auto kernel = a->bf16                   ? k_attention_cta_per_head<NBI_BF16, true>
                  : a->kv.dtype == NBI_F32  ? k_attention_cta_per_head<NBI_F32, false>
                  : a->kv.dtype == NBI_F16  ? k_attention_cta_per_head<NBI_F16, false>
                  : a->kv.dtype == NBI_BF16 ? k_attention_cta_per_head<NBI_BF16, false>
                                            : k_attention_cta_per_head<NBI_E4M3, false>;
    CU_LAUNCH(kernel, dim3(k.N, k.NH, k.splits), GENERIC_THREADS, 0, s->queue, k);
    CU_LAUNCHED();
    return merge_splits(s, k);
}

/* Rows that share no keys: prefill tiles would gain nothing, so they go in chunks to decode. */
static enum nb_status attention_in_chunks(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    int64_t row = a->NH * a->D * (int64_t)sizeof(float), head = a->NH * (int64_t)sizeof(float);
    for (int64_t n = 0; n < a->N; n += NBI_DECODE_ATTENTION_ROWS) {
        struct nbi_op_attention chunk = *a;
        struct nbi_ptr *indices[] = {&chunk.first, &chunk.last, &chunk.tables};
        chunk.N = a->N - n < NBI_DECODE_ATTENTION_ROWS ? a->N - n : NBI_DECODE_ATTENTION_ROWS;
        chunk.y = nbi_ptr_add(a->y, n * row);
        chunk.q = nbi_ptr_add(a->q, n * row);
        if (a->lse.at)
            chunk.lse = nbi_ptr_add(a->lse, n * head);
        for (int i = 0; i < 3; i++)
            *indices[i] = nbi_ptr_add(*indices[i], n * (int64_t)sizeof(int32_t));
        NBI_TRY(nbi_cuda_attention(s, &chunk));
    }
    return NB_OK;
}

bool nbi_cuda_is_decode_attention(const struct nbi_op_attention *a)
{
    return a->matmul == NBI_MATMUL_FAST && !a->bf16 && (a->D == 128 || a->D == 64) &&
           a->N <= NBI_DECODE_ATTENTION_ROWS && a->kv.dtype != NBI_F32 &&
           a->NH / a->NKV <= DECODE_GROUP_MAX;
}

static struct attention_args args_of(const struct nbi_stream *s, const struct nbi_op_attention *a)
{
    struct attention_args k = {};
    k.y = at<float>(a->y);
    k.lse = at<float>(a->lse);
    k.q = at<const float>(a->q);
    k.k = at<const uint8_t>(a->kv.k);
    k.v = at<const uint8_t>(a->kv.v);
    k.first = at<const int32_t>(a->first);
    k.last = at<const int32_t>(a->last);
    k.pages = at<const int32_t>(a->pages);
    k.tables = at<const int32_t>(a->tables);
    k.partials = s->attention_partials;
    k.arrived = s->attention_counters;
    k.N = (int)a->N;
    k.NH = (int)a->NH;
    k.NKV = (int)a->NKV;
    k.D = (int)a->D;
    k.group = (int)(a->NH / a->NKV);
    k.splits = 1;
    k.batch_invariant = a->batch_invariant;
    k.scale = LOG2E / sqrtf((float)a->D);
    return k;
}

enum nb_status nbi_cuda_attention_packed(struct nbi_stream *s, const struct nbi_op_attention *a,
                                         const struct nbi_op_qkv_rope *rope, bool *packed)
{
    *packed = false;
    if (!nbi_cuda_is_decode_attention(a))
        return nbi_cuda_attention(s, a);
    struct rope_args r = {};
    if (rope)
        r = nbi_cuda_rope_args(rope);
    return nbi_cuda_attention_decode(s, a, args_of(s, a), r, packed);
}

enum nb_status nbi_cuda_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    CU_HERE(s);
    if (a->N == 0)
        return NB_OK;
    NBI_BUG_IF(a->bf16 && (a->kv.dtype != NBI_BF16 || a->pages.at));
    if (a->kv_unshared && !a->bf16 && a->N > NBI_DECODE_ATTENTION_ROWS)
        return attention_in_chunks(s, a);
    const struct attention_args k = args_of(s, a);
    if (nbi_cuda_is_decode_attention(a))
        return nbi_cuda_attention_decode(s, a, k, {}, NULL);
    if (a->matmul == NBI_MATMUL_FAST && (a->D == 128 || a->D == 64) &&
        (a->bf16 || a->N > NBI_DECODE_ATTENTION_ROWS))
        return nbi_cuda_attention_prefill(s, a, k);
    return attention_generic(s, a, k);
}
