/* train_loss.cu - cross entropy, with the divergence from a reference model.
 *
 * A CTA takes a row of logits and passes over it twice: once for the maximum and the sum of
 * e^(logit - max), once for the gradient, which may overwrite the logits. Of a slice of the row it
 * makes the gradient alone, from what the first pass has kept. */
#include <float.h>

#include "backend/cuda/train.cuh"

#define THREADS 512

template <typename T> struct xent_args {
    float *loss, *kl; /* [N]; kl may be NULL */
    T *dlogits;       /* may be logits; NULL: no gradient */
    const T *logits;
    const int32_t *targets, *ref_ids;
    const float *ref_p, *weight;
    struct nbi_xent_kept *kept; /* [N], or NULL */
    float scale, kl_scale;
    int ref_k;
    int64_t V;
};

/* What one id of the reference adds to the loss, and what the gradient needs of it. Only one row's
 * are kept, in dynamic shared memory, after the set of the ids as V bits. */
struct xent_ref {
    double cross; /* b log(b / e^(logit - max)) */
    float e;      /* the logit, then e^(logit - max) */
    float b;
    int32_t id;
};

static __host__ __device__ inline int64_t id_set_bytes(int64_t V)
{
    return (V + 127) / 128 * 16;
}

/* A maximum and the sum of e^(x - max). The maximum starts at a finite value, so that logits of
 * minus infinity add 0 and a NaN or infinity makes the sum NaN. */
struct max_sum {
    float max, sum;
};

template <int V>
__device__ static inline void add_logits(struct max_sum &m, const float x[V], unsigned left_out)
{
    float max = m.max, sum = 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        max = fmaxf(max, x[i]);
#pragma unroll
    for (int i = 0; i < V; i++)
        sum += left_out >> i & 1 ? 0 : expf(x[i] - max);
    m.sum = (max > m.max ? m.sum * expf(m.max - max) : m.sum) + sum;
    m.max = max;
}

/* The maximum of a row, and the sum over the ids that are not in the set; over all if it is NULL.
 */
template <typename T, int V>
__device__ static inline float row_max(const struct xent_args<T> &a, const T *logits,
                                       const uint8_t *id_set, double *others)
{
    __shared__ float maxima[32];
    __shared__ double sums[32];
    struct max_sum m = {-FLT_MAX, 0};
    for (int64_t i = threadIdx.x; i < a.V / V; i += blockDim.x) {
        float x[V];
        load_n<V>(x, logits + i * V);
        add_logits<V>(m, x, id_set ? id_set[i * V / 8] >> (i * V % 8) : 0);
    }
    float max = warp_max(m.max);
    if (threadIdx.x % 32 == 0)
        maxima[threadIdx.x / 32] = max;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++)
        max = fmaxf(max, maxima[i]);
    *others = cta_sum((double)(m.sum * expf(m.max - max)), sums);
    return max;
}

/* Reads the ids of the row's reference and makes the set of them. */
template <typename T>
__device__ static inline void read_ref(const struct xent_args<T> &a, const T *logits,
                                       uint8_t *id_set, struct xent_ref *ref)
{
    uint32_t *words = (uint32_t *)id_set;
    int64_t first = (int64_t)blockIdx.x * a.ref_k;
    for (int64_t i = threadIdx.x; i < id_set_bytes(a.V) / 4; i += blockDim.x)
        words[i] = 0;
    __syncthreads();
    for (int j = threadIdx.x; j < a.ref_k; j += blockDim.x) {
        ref[j].id = a.ref_ids[first + j];
        ref[j].b = a.ref_p[first + j];
        ref[j].e = to_f32(logits[ref[j].id]);
        atomicOr(words + ref[j].id / 32, 1u << ref[j].id % 32);
    }
    __syncthreads();
}

/* What the gradient of a row is made of: by[0] times e^(logit - max), or by[1] times that less
 * kl_scale b for the ids of the reference; and less scale for the target. */
struct row_gradient {
    float by[2], scale, kl_scale;
};

/* Finishes the loss of a row from the sum over the ids that the reference does not list; one thread
 * does. With the sums S over all ids and R over those not listed, of probabilities b and their
 * remainder q = 1 - sum b, KL = sum b log(b / p) + q log(q S / R). Its gradient is p - b for listed
 * ids and p - q p S / R for the others. R is at least FLT_MIN: e^x of everything smaller has
 * underflowed. */
template <typename T>
__device__ static inline struct row_gradient finish_row(const struct xent_args<T> &a, float max,
                                                        double others, double target_logit,
                                                        const struct xent_ref *ref, int ref_k)
{
    int64_t n = blockIdx.x;
    bool has_target = a.targets[n] >= 0;
    double listed = 0, cross = 0, b = 0;
    for (int j = 0; j < ref_k; j++) {
        listed += (double)ref[j].e;
        cross += ref[j].cross;
        b += (double)ref[j].b;
    }
    double S = listed + others, R = others < (double)FLT_MIN ? (double)FLT_MIN : others;
    double q = b < 1 ? 1 - b : 0, log_S = log(S), weight = a.weight ? (double)a.weight[n] : 1;
    double of_kl = ref_k > 0 ? weight * (double)a.kl_scale : 0;
    double of_loss = has_target ? weight * (double)a.scale : 0;
    a.loss[n] = has_target ? (float)(log_S + (double)max - target_logit) : 0;
    if (a.kl)
        a.kl[n] = ref_k > 0 ? (float)(cross + b * log_S + (q > 0 ? q * log(q * S / R) : 0)) : 0;
    return {{(float)(of_loss / S + of_kl * ((b + q) / S - q / R)),
             (float)((of_loss + of_kl * (b + q)) / S)},
            (float)of_loss,
            (float)of_kl};
}

/* The gradient of logit x, whose id the reference does not list; and of one that it does, with
 * e = e^(x - max) and probability b. */
__device__ static inline float gradient_of(float x, float max, const struct row_gradient &g,
                                           bool is_target)
{
    float d = expf(x - max) * g.by[0];
    return is_target ? d - g.scale : d;
}

__device__ static inline float listed_gradient(float e, float b, const struct row_gradient &g,
                                               bool is_target)
{
    float d = e * g.by[1] - g.kl_scale * b;
    return is_target ? d - g.scale : d;
}

template <typename T, int V>
__device__ static inline void write_gradient(const struct xent_args<T> &a, const T *logits,
                                             float max, const struct row_gradient &g,
                                             const struct xent_ref *ref, int ref_k)
{
    int32_t target = a.targets[blockIdx.x];
    T *d = a.dlogits + blockIdx.x * a.V;
    for (int64_t i = threadIdx.x; i < a.V / V; i += blockDim.x) {
        float x[V];
        load_n<V>(x, logits + i * V);
#pragma unroll
        for (int j = 0; j < V; j++)
            x[j] = gradient_of(x[j], max, g, i * V + j == target);
        store_n<V>(d + i * V, x);
    }
    if (ref_k == 0)
        return;
    __syncthreads(); /* the same ids have just been written */
    for (int j = threadIdx.x; j < ref_k; j += blockDim.x)
        d[ref[j].id] = from_f32<T>(listed_gradient(ref[j].e, ref[j].b, g, ref[j].id == target));
}

/* A row without target and reference. */
template <typename T, int V> __device__ static inline void write_zeros(const struct xent_args<T> &a)
{
    const float zero[V] = {};
    for (int64_t i = threadIdx.x; a.dlogits && i < a.V / V; i += blockDim.x)
        store_n<V>(a.dlogits + blockIdx.x * a.V + i * V, zero);
    if (threadIdx.x == 0) {
        a.loss[blockIdx.x] = 0;
        if (a.kl)
            a.kl[blockIdx.x] = 0;
    }
}

template <typename T, int V>
__global__ static void __launch_bounds__(THREADS)
    k_xent_cta_per_row(const __grid_constant__ struct xent_args<T> a)
{
    CU_DYNAMIC_SMEM(smem, 16);
    __shared__ struct row_gradient gradient;
    struct xent_ref *ref = (struct xent_ref *)(smem + id_set_bytes(a.V));
    const T *logits = a.logits + blockIdx.x * a.V;
    int32_t target = a.targets[blockIdx.x];
    bool has_ref = a.ref_k > 0 && a.ref_ids[(int64_t)blockIdx.x * a.ref_k] >= 0;
    int ref_k = has_ref ? a.ref_k : 0;
    if (target < 0 && !has_ref) {
        write_zeros<T, V>(a);
        return;
    }
    double target_logit = target >= 0 ? (double)to_f32(logits[target]) : 0, others;
    if (has_ref)
        read_ref(a, logits, smem, ref);
    float max = row_max<T, V>(a, logits, has_ref ? smem : NULL, &others);
    for (int j = threadIdx.x; j < ref_k; j += blockDim.x) {
        double b = (double)ref[j].b, x = (double)ref[j].e - (double)max;
        ref[j].cross = b > 0 ? b * (log(b) - x) : 0;
        ref[j].e = expf(ref[j].e - max);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        gradient = finish_row(a, max, others, target_logit, ref, ref_k);
        if (a.kept)
            a.kept[blockIdx.x] = {gradient.by[1], gradient.by[0], max};
    }
    __syncthreads();
    if (a.dlogits)
        write_gradient<T, V>(a, logits, max, gradient, ref, ref_k);
}

template <typename T> static enum nb_status xent(struct nbi_stream *s, const struct nbi_op_xent *op)
{
    constexpr int V = vector_size<T>();
    const struct xent_args<T> a = {
        at<float>(op->loss), at<float>(op->kl), at<T>(op->dlogits), at<T>(op->logits),
            at<int32_t>(op->targets), at<int32_t>(op->ref_ids), at<float>(op->ref_p),
            at<float>(op->weight), at<struct nbi_xent_kept>(op->kept), op->scale, op->kl_scale,
            (int)op->ref_k, op->V
    };
    bool vectors = is_vectorizable<T>(op->logits.at | op->dlogits.at, op->V, op->V);
    int64_t smem =
        op->ref_k > 0 ? id_set_bytes(op->V) + op->ref_k * (int64_t)sizeof(struct xent_ref) : 0;
    unsigned threads = threads_for(op->V / (vectors ? V : 1), THREADS);
    if (smem > 40 << 10) /* with the static part, what every device grants unasked */
        return nbi_fail(NB_EUNSUPPORTED, "a reference for a vocabulary of %lld", (long long)op->V);
    if (vectors)
        CU_LAUNCH((k_xent_cta_per_row<T, V>), (unsigned)op->N, threads, (size_t)smem, s->queue, a);
    else
        CU_LAUNCH((k_xent_cta_per_row<T, 1>), (unsigned)op->N, threads, (size_t)smem, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_xent(struct nbi_stream *s, const struct nbi_op_xent *a)
{
    CU_HERE(s);
    return a->bf16 ? xent<__nv_bfloat16>(s, a) : xent<float>(s, a);
}

/* ---- slices ---- */

template <typename T> struct slice_args {
    T *dlogits; /* [N, count]; may be logits */
    const T *logits;
    const int32_t *targets, *ref_ids;
    const float *ref_p, *weight;
    const struct nbi_xent_kept *kept;
    float scale, kl_scale;
    int ref_k;
    int64_t first, count;
};

/* Where an id of the whole row is in the slice; -1: outside. */
template <typename T>
__device__ static inline int64_t place_of(const struct slice_args<T> &a, int id)
{
    return id >= a.first && id < a.first + a.count ? id - a.first : -1;
}

/* The ids of a reference keep e^(logit - max) in dynamic shared memory, since the logits may be
 * overwritten. */
template <typename T, int V>
__global__ static void __launch_bounds__(THREADS)
    k_xent_slice_cta_per_row(const __grid_constant__ struct slice_args<T> a)
{
    CU_DYNAMIC_SMEM(smem, 16);
    float *e = (float *)smem;
    int64_t n = blockIdx.x, target = a.targets[n] >= 0 ? place_of(a, a.targets[n]) : -1;
    const struct nbi_xent_kept kept = a.kept[n];
    const int32_t *ids = a.ref_ids + n * a.ref_k;
    int ref_k = a.ref_k > 0 && ids[0] >= 0 ? a.ref_k : 0;
    bool known = a.targets[n] >= 0 || ref_k > 0;
    float weight = a.weight ? a.weight[n] : 1;
    const struct row_gradient g = {{kept.others, (float)kept.listed},
                                   a.targets[n] >= 0 ? weight * a.scale : 0,
                                   weight * a.kl_scale};
    const T *logits = a.logits + n * a.count;
    T *d = a.dlogits + n * a.count;
    for (int j = threadIdx.x; j < ref_k; j += blockDim.x)
        if (place_of(a, ids[j]) >= 0)
            e[j] = expf(to_f32(logits[place_of(a, ids[j])]) - kept.max);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.count / V; i += blockDim.x) {
        float x[V];
        load_n<V>(x, logits + i * V);
#pragma unroll
        for (int j = 0; j < V; j++)
            x[j] = known ? gradient_of(x[j], kept.max, g, i * V + j == target) : 0;
        store_n<V>(d + i * V, x);
    }
    __syncthreads(); /* the same ids have just been written */
    for (int j = threadIdx.x; j < ref_k; j += blockDim.x) {
        int64_t i = place_of(a, ids[j]);
        if (i >= 0)
            d[i] = from_f32<T>(listed_gradient(e[j], a.ref_p[n * a.ref_k + j], g, i == target));
    }
}

template <typename T>
static enum nb_status xent_slice(struct nbi_stream *s, const struct nbi_op_xent_slice *op)
{
    constexpr int V = vector_size<T>();
    const struct slice_args<T> a = {
        at<T>(op->dlogits), at<T>(op->logits), at<int32_t>(op->targets), at<int32_t>(op->ref_ids),
            at<float>(op->ref_p), at<float>(op->weight), at<struct nbi_xent_kept>(op->kept),
            op->scale, op->kl_scale, (int)op->ref_k, op->first, op->count
    };
    bool vectors = is_vectorizable<T>(op->logits.at | op->dlogits.at, op->count, op->count);
    size_t smem = (size_t)op->ref_k * sizeof(float);
    unsigned threads = threads_for(op->count / (vectors ? V : 1), THREADS);
    if (vectors)
        CU_LAUNCH((k_xent_slice_cta_per_row<T, V>), (unsigned)op->N, threads, smem, s->queue, a);
    else
        CU_LAUNCH((k_xent_slice_cta_per_row<T, 1>), (unsigned)op->N, threads, smem, s->queue, a);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_xent_slice(struct nbi_stream *s, const struct nbi_op_xent_slice *a)
{
    CU_HERE(s);
    return a->bf16 ? xent_slice<__nv_bfloat16>(s, a) : xent_slice<float>(s, a);
}
