/* sampling.cu - the best of the logits, largest first. */
#include "backend/cuda/launch.cuh"
#include "backend/cuda/sort_key.cuh"

#define SLICE   2048 /* logits that a block looks through; nbi_topk_scratch_bytes counts on it */
#define THREADS 512

#define EACH (SLICE / THREADS)
#define LIST (EACH * NBI_TOPK_MAX)

/* A number that J threads have a key of or above, more only if keys are the same. */
__device__ static inline uint64_t least_of_best(uint64_t key, int J)
{
    uint32_t high = 0, low = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit; bit >>= 1)
        if (__syncthreads_count(key >> 32 >= (high | bit)) >= J)
            high |= bit;
    if (__syncthreads_count(key >> 32 >= high) > J)
#pragma unroll 1
        for (uint32_t bit = 1u << 31; bit; bit >>= 1)
            if (__syncthreads_count(key >= ((uint64_t)high << 32 | low | bit)) >= J)
                low |= bit;
    return (uint64_t)high << 32 | low;
}

/* Of SLICE keys in shared memory the best J to the front, largest first; 0 is none. Keys above the
 * J-th best of what threads have as their best are few, since at most J threads have any. Those
 * that say that something was odd may be many, but then nothing else matters. */
__device__ static void keep_best(uint64_t *keys, int J)
{
    __shared__ uint64_t list[LIST];
    __shared__ int count;
    uint64_t own[EACH], best = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        own[i] = keys[threadIdx.x + i * THREADS];
        best = max(best, own[i]);
    }
    if (threadIdx.x == 0)
        count = 0;
    uint64_t least = least_of_best(best, J);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (own[i] && own[i] >= least) {
            int at = atomicAdd(&count, 1);
            if (at < LIST)
                list[at] = own[i];
        }
    if (threadIdx.x < J)
        keys[threadIdx.x] = 0;
    __syncthreads();
    int n = min(count, LIST), before = 0;
    if (threadIdx.x < n) {
        uint64_t key = list[threadIdx.x];
        for (int i = 0; i < n; i++)
            before += list[i] > key || (list[i] == key && i < threadIdx.x);
        if (before < J)
            keys[before] = key;
    }
    __syncthreads();
}

/* The best J of a slice of a row, as keys. */
__global__ static void k_top_slice(uint64_t *out, const float *logits, int64_t V, int J)
{
    __shared__ uint64_t keys[SLICE];
    int64_t row = blockIdx.y, from = (int64_t)blockIdx.x * SLICE;
    const float *x = logits + row * V;
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        uint64_t key = from + i < V ? key_of(x[from + i], (uint32_t)(from + i)) : 0;
        best = max(best, key);
        keys[i] = key;
    }
    out += (row * gridDim.x + blockIdx.x) * J;
    if (J == 1) {
        best = block_best(best);
        if (threadIdx.x == 0)
            out[0] = best;
        return;
    }
    keep_best(keys, J);
    for (int i = threadIdx.x; i < J; i += THREADS)
        out[i] = keys[i];
}

/* The best J of those, in rounds: what has been kept so far, and the next. */
__global__ static void k_top_join(int32_t *ids, float *values, int32_t *odd, const uint64_t *parts,
                                  int count, int J)
{
    __shared__ uint64_t keys[SLICE];
    int64_t row = blockIdx.x;
    parts += row * count;
    int kept = 0;
    pdl_trigger();
    pdl_wait();
    for (int at = 0; at < count; kept = J) {
        int n = min(SLICE - kept, count - at);
        for (int i = threadIdx.x; i < SLICE - kept; i += THREADS)
            keys[kept + i] = i < n ? parts[at + i] : 0;
        keep_best(keys, J);
        at += n;
    }
    if (threadIdx.x == 0)
        odd[row] = keys[0] == NONFINITE_KEY;
    for (int i = threadIdx.x; i < J; i += THREADS) {
        ids[row * J + i] = id_of(keys[i]);
        values[row * J + i] = value_of(keys[i]);
    }
}

/* As that, of one each. */
__global__ static void k_best_join(int32_t *ids, float *values, int32_t *odd, const uint64_t *parts,
                                   int count)
{
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < count; i += THREADS)
        best = max(best, parts[(int64_t)blockIdx.x * count + i]);
    best = block_best(best);
    if (threadIdx.x == 0) {
        odd[blockIdx.x] = best == NONFINITE_KEY;
        ids[blockIdx.x] = id_of(best);
        values[blockIdx.x] = value_of(best);
    }
}

enum nb_status nbi_cuda_topk(struct nbi_stream *s, const struct nbi_op_topk *a)
{
    const struct argmax_keys known = s->best;
    CU_HERE(s);
    unsigned slices = (unsigned)ceil_div(a->V, SLICE), J = (unsigned)a->k;
    uint64_t *parts = (uint64_t *)at<uint8_t>(a->scratch);
    NBI_BUG_IF(a->k < 1 || a->k > NBI_TOPK_MAX || a->k > a->V);
    int32_t *ids = at<int32_t>(a->ids), *odd = at<int32_t>(a->nonfinite);
    float *values = at<float>(a->values), *logits = at<float>(a->logits);
    if (J == 1 && a->N == 1 && known.logits == logits && known.V == a->V) {
        CU_TRY(
            pdl_launch(s, k_best_join, 1u, THREADS, 0, ids, values, odd, known.keys, known.count));
        return NB_OK;
    }
    CU_TRY(pdl_launch(s, k_top_slice, dim3(slices, (unsigned)a->N), THREADS, 0, parts, logits, a->V,
                      (int)J));
    if (J == 1)
        CU_TRY(pdl_launch(s, k_best_join, (unsigned)a->N, THREADS, 0, ids, values, odd, parts,
                          (int)slices));
    else
        CU_TRY(pdl_launch(s, k_top_join, (unsigned)a->N, THREADS, 0, ids, values, odd, parts,
                          (int)(slices * J), (int)J));
    return NB_OK;
}
