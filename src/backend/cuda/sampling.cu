/* sampling.cu - top-k of the logits, largest first.
 *
 * One CTA reduces each chunk of a row to its top k, another one merges the chunks of a row. All
 * work is on sort keys, which no two logits share, so the result is unique. */
#include "backend/cuda/launch.cuh"
#include "backend/cuda/sort_key.cuh"

/* Keys that a CTA has in shared memory; nbi_topk_scratch_bytes counts on 2048. */
#define CHUNK   2048
#define THREADS 512

#define KEYS_PER_THREAD (CHUNK / THREADS)
#define CANDIDATES_MAX  (KEYS_PER_THREAD * NBI_TOPK_MAX)

/* The k-th largest of the threads' keys (0 where there are fewer), found bit by bit. With equal
 * upper halves the lower half is needed only to break ties. */
__device__ static inline uint64_t kth_largest(uint64_t key, int k)
{
    uint32_t high = 0, low = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit; bit >>= 1)
        if (__syncthreads_count(key >> 32 >= (high | bit)) >= k)
            high |= bit;
    if (__syncthreads_count(key >> 32 >= high) > k)
#pragma unroll 1
        for (uint32_t bit = 1u << 31; bit; bit >>= 1)
            if (__syncthreads_count(key >= ((uint64_t)high << 32 | low | bit)) >= k)
                low |= bit;
    return (uint64_t)high << 32 | low;
}

/* Moves the k largest of CHUNK keys in shared memory to the front, largest first; 0 is no key.
 *
 * Candidates are the keys not below the k-th largest of the threads' maxima. At most k threads
 * have any, so they fit CANDIDATES_MAX. Only NONFINITE_KEY can occur more often; then the other
 * keys do not matter. */
__device__ static void cta_topk(uint64_t *keys, int k)
{
    __shared__ uint64_t list[CANDIDATES_MAX];
    __shared__ int count;
    uint64_t own[KEYS_PER_THREAD], best = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < KEYS_PER_THREAD; i++) {
        own[i] = keys[threadIdx.x + i * THREADS];
        best = max(best, own[i]);
    }
    if (threadIdx.x == 0)
        count = 0;
    uint64_t threshold = kth_largest(best, k);
#pragma unroll
    for (int i = 0; i < KEYS_PER_THREAD; i++)
        if (own[i] && own[i] >= threshold) {
            int at = atomicAdd(&count, 1);
            if (at < CANDIDATES_MAX)
                list[at] = own[i];
        }
    if (threadIdx.x < k)
        keys[threadIdx.x] = 0;
    __syncthreads();
    int n = min(count, CANDIDATES_MAX), rank = 0;
    if (threadIdx.x < n) {
        uint64_t key = list[threadIdx.x];
        for (int i = 0; i < n; i++)
            rank += list[i] > key || (list[i] == key && i < threadIdx.x);
        if (rank < k)
            keys[rank] = key;
    }
    __syncthreads();
}

/* The top k of a chunk of a row, as keys. */
__global__ static void k_topk_chunk(uint64_t *out, const float *logits, int64_t V, int k)
{
    __shared__ uint64_t keys[CHUNK];
    int64_t row = blockIdx.y, from = (int64_t)blockIdx.x * CHUNK;
    const float *x = logits + row * V;
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        uint64_t key = from + i < V ? sort_key_of(x[from + i], (uint32_t)(from + i)) : 0;
        best = max(best, key);
        keys[i] = key;
    }
    out += (row * gridDim.x + blockIdx.x) * k;
    if (k == 1) {
        best = cta_max_key(best);
        if (threadIdx.x == 0)
            out[0] = best;
        return;
    }
    cta_topk(keys, k);
    for (int i = threadIdx.x; i < k; i += THREADS)
        out[i] = keys[i];
}

/* The top k of a row from `count` keys of its chunks. Each round takes the k kept so far and as
 * many new keys as fit. */
__global__ static void k_topk_merge(int32_t *ids, float *values, int32_t *nonfinite,
                                    const uint64_t *chunks, int count, int k)
{
    __shared__ uint64_t keys[CHUNK];
    int64_t row = blockIdx.x;
    chunks += row * count;
    int kept = 0;
    pdl_trigger();
    pdl_wait();
    for (int at = 0; at < count; kept = k) {
        int n = min(CHUNK - kept, count - at);
        for (int i = threadIdx.x; i < CHUNK - kept; i += THREADS)
            keys[kept + i] = i < n ? chunks[at + i] : 0;
        cta_topk(keys, k);
        at += n;
    }
    if (threadIdx.x == 0)
        nonfinite[row] = keys[0] == NONFINITE_KEY;
    for (int i = threadIdx.x; i < k; i += THREADS) {
        ids[row * k + i] = id_of(keys[i]);
        values[row * k + i] = value_of(keys[i]);
    }
}

/* k_topk_merge for k = 1. */
__global__ static void k_argmax_merge(int32_t *ids, float *values, int32_t *nonfinite,
                                      const uint64_t *keys, int count)
{
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < count; i += THREADS)
        best = max(best, keys[(int64_t)blockIdx.x * count + i]);
    best = cta_max_key(best);
    if (threadIdx.x == 0) {
        nonfinite[blockIdx.x] = best == NONFINITE_KEY;
        ids[blockIdx.x] = id_of(best);
        values[blockIdx.x] = value_of(best);
    }
}

enum nb_status nbi_cuda_topk(struct nbi_stream *s, const struct nbi_op_topk *a)
{
    CU_HERE(s);
    unsigned chunks = (unsigned)ceil_div(a->V, CHUNK), k = (unsigned)a->k;
    uint64_t *keys = (uint64_t *)at<uint8_t>(a->scratch);
    NBI_BUG_IF(a->k < 1 || a->k > NBI_TOPK_MAX || a->k > a->V);
    int32_t *ids = at<int32_t>(a->ids), *nonfinite = at<int32_t>(a->nonfinite);
    float *values = at<float>(a->values), *logits = at<float>(a->logits);
    CU_TRY(pdl_launch(s, k_topk_chunk, dim3(chunks, (unsigned)a->N), THREADS, 0, keys, logits, a->V,
                      (int)k));
    if (k == 1)
        CU_TRY(pdl_launch(s, k_argmax_merge, (unsigned)a->N, THREADS, 0, ids, values, nonfinite,
                          keys, (int)chunks));
    else
        CU_TRY(pdl_launch(s, k_topk_merge, (unsigned)a->N, THREADS, 0, ids, values, nonfinite, keys,
                          (int)(chunks * k), (int)k));
    return NB_OK;
}
