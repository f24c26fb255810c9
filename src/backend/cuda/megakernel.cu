/* megakernel.cu - the decode megakernel: one token through the whole model in one kernel.
 *
 * Decoding reads every weight once and does little else, so the memory must never wait. One CTA
 * stays on each multiprocessor, and its warps keep copies of weight tiles in flight all the time,
 * also while CTAs wait for each other, norms are computed or attention runs. megakernel.cuh
 * explains this weight pipeline, and how CTAs exchange values without a grid-wide barrier.
 *
 * A layer:
 *
 *             x                                    a CTA has              it produces
 *   QKV       norm(residual += sums of DOWN)       rows                   tagged q, k, v
 *   attention                                      a head, or some keys   tagged softmaxes of keys
 *   O         attention                            rows of one head       sums
 *   GATE_UP   norm(residual += sums of O)          rows                   tagged SwiGLU values
 *   DOWN      SwiGLU                               rows and columns       sums
 *
 * and after the last one LOGITS. In O a CTA has the columns of one head, so that it needs no other
 * head. The results of several CTAs for the same rows of o and down are added as integers, which
 * makes the sum independent of the order. Every CTA keeps a copy of the residual stream in shared
 * memory and computes the norms itself.
 *
 * Products take x in f16, with one power of two for each block of 16 values.
 *
 * Run-ahead: between two tokens the GPU would wait for the host to read the logits and choose a
 * token. Instead a small kernel chooses it on the GPU, and the next token's kernel is queued before
 * the host knows the choice:
 *
 *   GPU    k_megakernel, token n   | k_argmax_next or   | k_megakernel, token n + 1
 *                                  | k_sample_next      |
 *   host   queues the next kernels | polls the mailbox  | samples the same token; if it chooses
 *          on the right            | for id and top-k   | another one, the step is run again */
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/megakernel_attention_split.cuh"

#define MAILBOX_NONFINITE 0xFFFFFFFFu /* in place of an id: a logit was not finite */
#define POLLS_PER_QUERY   8192        /* of the mailbox, for each query of the stream's status */

/* ---- the kernel ---- */

/* Makes a tensor map that the host has written visible to bulk tensor copies. */
__device__ static inline void acquire_tensor_map(const struct tensor_map *map)
{
#if HAS_BULK_COPY
    fence_tensor_map(map);
#endif
}

/* Shared memory that stays the same for the whole kernel: layers, plans, mbarriers. */
__device__ static void init_cta(struct context &c)
{
    const uint32_t *from = (const uint32_t *)c.m.layers;
    int words = c.m.layer_count * (int)sizeof(struct layer) / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t *)c.layers())[i] = from[i];
    if (threadIdx.x < GEMVS)
        c.cta_plan()[threadIdx.x] = c.m.cta_plans[threadIdx.x * gridDim.x + blockIdx.x];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < GEMVS * c.m.row_pairs; i += THREADS) {
        int gemv = i / c.m.row_pairs, row_pair = i - gemv * c.m.row_pairs;
        const struct cta_work own = c.cta_plan()[gemv];
        if (row_pair < row_pairs_of(own))
            c.row_pairs()[i] = make_row_pair(c.m, own, gemv, row_pair);
    }
    if (threadIdx.x < GEMVS * WARPS) {
        int gemv = threadIdx.x / WARPS;
        const struct cta_work own = c.cta_plan()[gemv];
        struct range r = warp_range(own, threadIdx.x % WARPS);
        int row_pair = r.begin / max(own.cols, 1);
        c.warp_plan()[threadIdx.x] = {(short)row_pair, (short)(r.begin - row_pair * own.cols),
                                      r.end - r.begin};
    }
    if (threadIdx.x < WARPS * STAGES)
        mbarrier_init(smem_addr(c.stage_full() + threadIdx.x), 1);
    if (threadIdx.x < WARPS * 2)
        mbarrier_init(smem_addr(c.kv_full() + threadIdx.x), 1);
    if (threadIdx.x < 4)
        c.zeros()[threadIdx.x] = make_uint4(0, 0, 0, 0);
#if HAS_BULK_COPY
    fence_mbarrier_init();
#endif
    __syncthreads();
}

/* Divides `keys` older keys evenly; this token's own key comes on top in the last split. Returns
 * the keys of a split. */
__device__ static inline int keys_per_split(const struct model &m, int keys, int *used)
{
    int splits = min(max((keys + MIN_SPLIT_KEYS - 1) / MIN_SPLIT_KEYS, 1), m.max_splits);
    int each = max((keys + splits - 1) / splits, 1);
    *used = max((keys + each - 1) / each, 1);
    return each;
}

__device__ static struct kv_split choose_kv_split(const struct model &m, const struct step_args &a)
{
    int keys = a.last - a.first, group = m.NH / m.NKV, groups = m.NH / m.cta_heads;
    struct kv_split p = {0, 1, (int)blockIdx.x / m.ctas_per_head, 0, a.first, a.last};
    if (keys > SHORT_CONTEXT_KEYS) {
        int each = keys_per_split(m, keys, &p.splits);
        p.split = (int)blockIdx.x / groups;
        p.head = (int)blockIdx.x % groups * m.cta_heads;
        p.begin = min(a.first + p.split * each, a.last);
        p.end = min(p.begin + each, a.last);
    }
    p.kv_head = min(p.head, m.NH - 1) / group;
    return p;
}

__device__ static void init_rope(struct context &c, int position)
{
    if (threadIdx.x < HEAD_DIM / 2) {
        double sn, cs;
        sincos((double)((float)position * c.m.frequency[threadIdx.x]), &sn, &cs);
        c.rope()[threadIdx.x] = (float)cs * c.m.rope_scale;
        c.rope()[HEAD_DIM / 2 + threadIdx.x] = (float)sn * c.m.rope_scale;
    }
}

#define EMBED_UNROLL 3 /* values of the embedding that a thread loads at a time */

/* The residual stream starts as the token's row of the embedding. */
__device__ static void load_embedding(struct context &c, const struct step_args &a,
                                      const struct embed_row &row)
{
    const void *from = a.row ? a.row : row.bytes;
#pragma unroll 1
    for (int i = threadIdx.x; i < c.m.C; i += EMBED_UNROLL * THREADS) {
        float x[EMBED_UNROLL];
        load_f32_n<EMBED_UNROLL>(x, from, i, THREADS, c.m.C, c.m.embed_type);
#pragma unroll
        for (int j = 0; j < EMBED_UNROLL; j++)
            if (i + j * THREADS < c.m.C)
                ((float *)c.x())[i + j * THREADS] = x[j];
    }
    __syncthreads();
}

/* One product with the computation of its x before it, up to grid_arrive. */
template <enum nbi_dtype T, int G, bool SHORT>
__device__ static void run_gemv(struct context &c, int gemv, int layer, const struct step_args &a,
                                const struct kv_split &p, struct norm_weights norms)
{
    if (gemv == O)
        attention<T, G, SHORT>(c, layer, a, p);
    else if (gemv == DOWN)
        x_from_act(c);
    else
        x_from_norm(c, gemv == GATE_UP || layer > 0, 2 * layer + (gemv == GATE_UP), norms);
    __syncthreads();
    if (!SHORT)
        prefetch_kv_tiles<T>(c, gemv, layer, p);
    if (gemv == QKV && SHORT)
        prefetch_keys<T>(c, layer, p);
    if ((gemv == QKV || gemv == GATE_UP) && threadIdx.x * 32 < c.m.C) /* the next norm */
        prefetch_l2(c.m.norms + (2 * layer + 1 + (gemv == GATE_UP)) * (int64_t)c.m.C +
                    threadIdx.x * 32);
    gemv_mainloop(c, gemv,
                  gemv == O      ? c.layers()[layer].scale[O_PROJ]
                  : gemv == DOWN ? c.layers()[layer].scale[DOWN_PROJ]
                                 : 1);
    if (gemv != O && gemv != DOWN) {
        __syncthreads();
        gemv_epilogue(c, gemv, min(layer, c.m.layer_count - 1), a.logits);
    }
}

/* Everything before pdl_wait depends on weights and parameters alone, so it may overlap the kernel
 * before. */
template <enum nbi_dtype T, int G, bool SHORT>
__global__ static void __launch_bounds__(THREADS, 1)
    k_megakernel(const __grid_constant__ struct model m, const __grid_constant__ struct step_args a,
                 const __grid_constant__ struct embed_row row)
{
    if (!HAS_BULK_COPY)
        return;
    struct context c = {
        m, a.epoch, a.sum_round, a.epoch + 1, (int)threadIdx.x / 32, (int)threadIdx.x % 32};
    /* Warps w, w + 4, ... share a scheduler. Shares that are one tile pair larger than others go to
     * warps of different schedulers. */
    c.work_index = c.warp % 4 * (WARPS / 4) + c.warp / 4;
    c.ring_at = smem_addr(c.stage_data() + c.warp * STAGES * STAGE_BYTES);
    c.full_at = smem_addr(c.stage_full() + c.warp * STAGES);
    c.stage_at = c.ring_at;
    c.stage_bar = c.full_at;
    c.weights.gemv = -1;
#pragma unroll 1
    for (int i = threadIdx.x; !SHORT && i < 2 * m.layer_count; i += THREADS)
        acquire_tensor_map(m.kv_maps + i);
    init_cta(c);
    pipeline_next_gemv(c, c.weights);
#pragma unroll 1
    for (int i = 0; i < STAGES; i++)
        pipeline_load(c, c.ring_at + i * STAGE_BYTES, c.full_at + i * 8);
    const struct kv_split p = choose_kv_split(m, a);
    struct norm_weights norms = load_norm_weights(c, 0, threadIdx.x);
    init_rope(c, a.position);
    pdl_wait();
    load_embedding(c, a, row);
#pragma unroll 1
    for (int layer = 0, gemv = QKV;;) {
        run_gemv<T, G, SHORT>(c, gemv, layer, a, p, norms);
        if (gemv == LOGITS)
            break;
        if (gemv == O || gemv == DOWN) {
            grid_arrive(c);
            norms = load_norm_weights(c, 2 * layer + 1 + (gemv == DOWN), threadIdx.x);
            c.sum_round++;
        }
        gemv = gemv < DOWN ? gemv + 1 : QKV;
        layer += gemv == QKV;
        if (layer == m.layer_count)
            gemv = LOGITS;
    }
}

/* ---- choosing the next token on the GPU ---- */

/* The mailbox is pinned host memory that the host polls. Each word carries a tag in its upper half:
 * first the id, then ids and values of the top-k. The chosen token's row of the embedding is copied
 * to where the next kernel reads it. */
struct next_token {
    uint64_t *mailbox;
    uint4 *row;
    const uint4 *embed;
    int row_words;
    uint32_t tag;
};

#define MAILBOX_WORDS (1 + 2 * NBI_TOPK_MAX)

__device__ static inline void host_publish(const struct next_token &next, int i, uint32_t word)
{
    next.mailbox[i] = (uint64_t)next.tag << 32 | word;
}

__device__ static inline void copy_embed_row(const struct next_token &next, int id)
{
    for (int i = threadIdx.x; i < next.row_words; i += THREADS)
        next.row[i] = next.embed[(int64_t)id * next.row_words + i];
}

/* Greedy: the token of the largest key. */
__global__ static void k_argmax_next(const struct next_token next, const uint64_t *keys, int count)
{
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < count; i += THREADS)
        best = max(best, keys[i]);
    best = cta_max_key(best);
    bool nonfinite = best == NONFINITE_KEY;
    int id = nonfinite ? 0 : id_of(best);
    copy_embed_row(next, id);
    if (threadIdx.x == 0) {
        host_publish(next, 0, nonfinite ? MAILBOX_NONFINITE : (uint32_t)id);
        host_publish(next, 1, (uint32_t)id);
        host_publish(next, 2, __float_as_uint(value_of(best)));
    }
}

/* Inclusive prefix sums of 64 integers of a warp: v[0] of lanes 0 to 31, then v[1]. */
__device__ static inline void warp_prefix_sums(int64_t v[2])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int o = 1; o < 32; o *= 2) {
            int64_t before = __shfl_up_sync(0xFFFFFFFF, v[i], o);
            v[i] += lane >= o ? before : 0;
        }
        if (i == 1)
            v[1] += __shfl_sync(0xFFFFFFFF, v[0], 31);
    }
}

/* Index of the first prefix sum larger than `at`. */
__device__ static inline int first_above(const int64_t sums[2], int64_t at)
{
    unsigned low = __ballot_sync(0xFFFFFFFF, sums[0] > at),
             high = __ballot_sync(0xFFFFFFFF, sums[1] > at);
    return low ? __ffs(low) - 1 : 31 + __ffs(high);
}

/* A warp samples one of the top k, whose values come largest first, as infer/sampler.c defines it.
 * Only the last bits of e^x may differ. The host samples too, and drops the run-ahead if it chose
 * another token. */
__device__ static int sample(const struct nbi_draw &d, const float *values, int k)
{
    int lane = threadIdx.x % 32;
    int64_t sums[2], left[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = lane + 32 * i;
        double x = at < k ? ((double)values[at] - (double)values[0]) * d.inv_temperature : -100;
        sums[i] = x < -50 ? 0 : (int64_t)(expf((float)x) * d.unit);
        left[i] = x >= d.log_min_p ? sums[i] : 0;
    }
    warp_prefix_sums(sums);
    warp_prefix_sums(left);
    int64_t all = __shfl_sync(0xFFFFFFFF, sums[1], 31),
            likely = __shfl_sync(0xFFFFFFFF, left[1], 31);
    double threshold = ceil(d.top_p * (double)all);
    int64_t top_p = d.top_p == 1 || threshold >= (double)all ? all
                    : threshold < 1                          ? 1
                                                             : (int64_t)threshold;
    int last = first_above(sums, top_p - 1);
    int64_t end = __shfl_sync(0xFFFFFFFF, last < 32 ? sums[0] : sums[1], last % 32);
    return first_above(sums, (int64_t)__umul64hi(d.uniform, (uint64_t)min(end, likely)));
}

/* One of the top k, which nbi_cuda_topk has written: non-finite flag, ids [k], values [k]. */
__global__ static void k_sample_next(const struct next_token next, const int32_t *topk, int k,
                                     const struct nbi_draw d)
{
    __shared__ int chosen;
    const int32_t *ids = topk + 1, *values = ids + k;
    pdl_trigger();
    pdl_wait();
    bool nonfinite = topk[0];
    if (threadIdx.x < 32) {
        int i = nonfinite ? 0 : sample(d, (const float *)values, k);
        if (threadIdx.x == 0)
            chosen = i;
    }
    __syncthreads();
    int id = nonfinite ? 0 : ids[chosen];
    copy_embed_row(next, id);
    for (int i = threadIdx.x; i < 2 * k; i += THREADS)
        host_publish(next, 1 + i, (uint32_t)ids[i]);
    if (threadIdx.x == 0)
        host_publish(next, 0, nonfinite ? MAILBOX_NONFINITE : (uint32_t)id);
}

/* ---- the host's side ---- */

struct nbi_megakernel {
    struct nbi_stream *s;
    struct model m;
    uint8_t *block;       /* device memory of all tables and exchange buffers */
    const uint8_t *embed; /* the embedding */
    int64_t row_bytes;    /* of it */
    bool embed_on_host;   /* then the token's row is a kernel parameter */
    struct embed_row row;
    uint4 *next_row;   /* device: the embedding row that k_argmax_next or k_sample_next chose */
    uint64_t *mailbox; /* [MAILBOX_WORDS], pinned */
    uint32_t tag;      /* of the last message in it */
    unsigned epoch, grid;
    unsigned sum_round;
    size_t smem_bytes;
    const void *kernel_short, *kernel_split; /* for short and for split attention */
};

typedef void (*megakernel_fn)(struct model, struct step_args, struct embed_row);

template <enum nbi_dtype T> static void choose_kernels(struct nbi_megakernel *t)
{
    int G = t->m.cta_heads;
    t->kernel_short = (const void *)(megakernel_fn)k_megakernel<T, 1, true>;
    t->kernel_split = G == 4   ? (const void *)(megakernel_fn)k_megakernel<T, 4, false>
                      : G == 2 ? (const void *)(megakernel_fn)k_megakernel<T, 2, false>
                               : (const void *)(megakernel_fn)k_megakernel<T, 1, false>;
}

static bool is_tiled(const struct nbi_weight *w)
{
    return w->dtype == NBI_NVFP4 && w->layout == NBI_WEIGHT_TILES;
}

static bool is_supported(const struct nbi_megakernel_model *m)
{
    enum nbi_dtype embed = m->embed.dtype;
    bool ok = m->D == HEAD_DIM && m->C % 16 == 0 && m->F % 16 == 0 && is_tiled(&m->head) &&
              m->kv[0].dtype != NBI_F32 &&
              (embed == NBI_F32 || embed == NBI_F16 || embed == NBI_BF16);
    for (int64_t i = 0; i < m->layers; i++) {
        const struct nbi_layer_weights *l = &m->layer[i];
        const struct nbi_weight *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < 7; j++)
            ok = ok && is_tiled(all[j]);
    }
    return ok;
}

/* ---- distribution over CTAs ---- */

/* The i-th of `of` nearly equal parts of [0, count). */
static struct range even_range(int64_t count, int i, int of)
{
    return {(int)(count * i / of), (int)(count * (i + 1) / of)};
}

/* The same with boundaries at multiples of PAIR. */
static struct range even_pair_range(int count, int i, int of)
{
    struct range r = even_range(ceil_div(count, PAIR), i, of);
    return {PAIR * r.begin, PAIR * r.end < count ? PAIR * r.end : count};
}

static void plan_ctas(struct cta_work *all, const struct model *m, int ctas)
{
    int qkv = (m->NH + 2 * m->NKV) * HEAD_DIM / 16, rows = m->C / 16;
    int pairs = (int)ceil_div(rows, PAIR);
    /* A large split-K factor, since a CTA has x of its columns in shared memory. */
    int split_k = choose_split_k(pairs, m->tile_cols[DOWN], ctas, WARPS, true);
    int row_ctas = ctas / split_k;
    for (int b = 0; b < ctas; b++) {
        struct cta_work p[GEMVS] = {};
        struct range r = even_range(qkv, b, ctas);
        p[QKV] = {r.begin, r.end - r.begin, 0, m->tile_cols[QKV]};
        if (b / m->ctas_per_head < m->NH) {
            r = even_pair_range(rows, b % m->ctas_per_head, m->ctas_per_head);
            p[O] = {r.begin, r.end - r.begin, b / m->ctas_per_head, 1};
        }
        r = even_range(m->F / 16, b, ctas);
        p[GATE_UP] = {2 * r.begin, 2 * (r.end - r.begin), 0, m->tile_cols[GATE_UP]};
        if (b < split_k * row_ctas) {
            struct range c = even_range(m->tile_cols[DOWN], b / row_ctas, split_k);
            r = even_pair_range(rows, b % row_ctas, row_ctas);
            p[DOWN] = {r.begin, r.end - r.begin, c.begin, c.end - c.begin};
        }
        r = even_range(ceil_div(m->V, 16), b, ctas);
        p[LOGITS] = {r.begin, r.end - r.begin, 0, m->tile_cols[LOGITS]};
        for (int i = 0; i < GEMVS; i++)
            all[i * ctas + b] = p[i];
    }
}

/* Sizes in shared memory that follow from the plans. */
static void measure_plans(struct model *m, const struct cta_work *all, int ctas)
{
    m->warp_row_pairs = m->row_pairs = 1;
    m->max_k = m->tile_cols[QKV] * CUDA_TILE_COLS;
    for (int i = 0; i < GEMVS * ctas; i++) {
        const struct cta_work *p = &all[i];
        m->row_pairs = row_pairs_of(*p) > m->row_pairs ? row_pairs_of(*p) : m->row_pairs;
        if (p->cols * CUDA_TILE_COLS > m->max_k)
            m->max_k = p->cols * CUDA_TILE_COLS;
        for (int w = 0; w < WARPS; w++) {
            struct range r = warp_range(*p, w);
            int n = r.end > r.begin ? (r.end - 1) / p->cols - r.begin / p->cols + 1 : 0;
            if (i / ctas != O && i / ctas != DOWN && n > m->warp_row_pairs)
                m->warp_row_pairs = n;
        }
    }
}

/* ---- tables ---- */

/* Host copies of what upload_tables sends to the device. */
struct host_tables {
    struct layer *layers;
    struct tensor_map *kv_maps;
    struct cta_work *cta_plans;
    float *norms, *qk_norms;
};

/* Describes a layer's keys or values for bulk tensor copies. The number of rows is not known here
 * and not needed: no copy asks for a row that does not exist. */
static enum nb_status make_kv_map(const struct model *m, void *rows, struct tensor_map *out)
{
    static_assert(sizeof(CUtensorMap) == sizeof *out, "a tensor map");
    int size = (int)nbi_dtype_bytes(m->kv_type, 1);
    const cuuint64_t dims[2] = {(cuuint64_t)m->NKV * HEAD_DIM, 1 << 30},
                     strides[1] = {(cuuint64_t)m->NKV * HEAD_DIM * size};
    const cuuint32_t box[2] = {128u / size, TILE_KEYS}, steps[2] = {1, 1};
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult got;
#if CUDART_VERSION < 12050
    CU_TRY(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &got));
#else
    CU_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                            cudaEnableDefault, &got));
#endif
    if (got != cudaDriverEntryPointSuccess)
        return nbi_fail(NB_EUNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    CUresult rc = ((decltype(&cuTensorMapEncodeTiled))found)(
        (CUtensorMap *)out,
        size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, rows, dims,
        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return rc == CUDA_SUCCESS ? NB_OK
                              : nbi_fail(NB_EUNSUPPORTED,
                                         "the layout of the KV cache does not allow tensor copies");
}

static enum nb_status fill_layer(struct nbi_megakernel *t, const struct host_tables *to, int64_t i,
                                 const struct nbi_megakernel_model *m)
{
    struct cuda *cuda = t->s->cuda;
    const struct nbi_layer_weights *l = &m->layer[i];
    const struct nbi_weight *all[] = {&l->q,    &l->k,  &l->v,    &l->o,
                                      &l->gate, &l->up, &l->down, &m->head};
    struct layer *out = &to->layers[i];
    for (int j = 0; j < MATRICES; j++) {
        out->tiles[j] = at<uint8_t>(all[j]->data);
        out->scale[j] = all[j]->tensor_scale;
    }
    out->k = at<void>(m->kv[i].k);
    out->v = at<void>(m->kv[i].v);
    NBI_TRY(make_kv_map(&t->m, out->k, to->kv_maps + 2 * i));
    NBI_TRY(make_kv_map(&t->m, out->v, to->kv_maps + 2 * i + 1));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->input_norm, to->norms + 2 * i * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->post_norm, to->norms + (2 * i + 1) * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->q_norm, to->qk_norms + 2 * i * HEAD_DIM));
    return nbi_cuda_vector_read(cuda, &l->k_norm, to->qk_norms + (2 * i + 1) * HEAD_DIM);
}

/* sms: multiprocessors, and so CTAs. */
static void fill_model(struct model *m, const struct nbi_megakernel_model *t, int sms)
{
    int group = (int)(t->NH / t->NKV);
    m->cta_heads = group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1;
    m->layer_count = (int)t->layers;
    m->C = (int)t->C;
    m->F = (int)t->F;
    m->NH = (int)t->NH;
    m->NKV = (int)t->NKV;
    m->V = (int)t->V;
    m->tile_cols[QKV] = m->tile_cols[GATE_UP] = m->tile_cols[LOGITS] = tiles_of(1, t->C).cols;
    m->tile_cols[O] = tiles_of(1, t->NH * HEAD_DIM).cols;
    m->tile_cols[DOWN] = tiles_of(1, t->F).cols;
    m->max_splits =
        sms / (m->NH / m->cta_heads) < KV_SPLITS_MAX ? sms / (m->NH / m->cta_heads) : KV_SPLITS_MAX;
    m->ctas_per_head = sms / m->NH;
    m->q_end = m->NH * HEAD_DIM / CUDA_TILE_ROWS;
    m->k_end = m->q_end + m->NKV * HEAD_DIM / CUDA_TILE_ROWS;
    m->embed_type = t->embed.dtype;
    m->kv_type = t->kv[0].dtype;
    m->frequency = at<float>(t->frequency);
    m->rope_scale = t->rope_scale;
    m->inv_C = 1 / (float)t->C;
    m->eps = t->eps;
}

/* Allocates one block for tables and exchange buffers; the first five are filled from the host. */
static enum nb_status upload_tables(struct nbi_megakernel *t, const struct host_tables *from)
{
    struct model *m = &t->m;
    int64_t q = (int64_t)(m->NH + 2 * m->NKV) * HEAD_DIM;
    const void *filled[5] = {from->layers, from->kv_maps, from->cta_plans, from->norms,
                             from->qk_norms};
    const struct {
        void *to;
        int64_t size;
    } pieces[] = {{&m->layers, (int64_t)sizeof(struct layer) * m->layer_count},
                  {&m->kv_maps, (int64_t)sizeof(struct tensor_map) * 2 * m->layer_count},
                  {&m->cta_plans, (int64_t)sizeof(struct cta_work) * GEMVS * t->grid},
                  {&m->norms, (int64_t)(2 * m->layer_count + 1) * m->C * 4},
                  {&m->qk_norms, (int64_t)m->layer_count * 2 * HEAD_DIM * 4},
                  {&m->qkv, q * 8},
                  {&m->softmaxes, (int64_t)m->NH * KV_SPLITS_MAX * SOFTMAX_FLOATS * 8},
                  {&m->sums[0], (int64_t)m->C * 8},
                  {&m->sums[1], (int64_t)m->C * 8},
                  {&m->sums[2], (int64_t)m->C * 8},
                  {&m->sums[3], (int64_t)m->C * 8},
                  {&m->act, (int64_t)m->F / 2 * 8},
                  {&m->act_scale, (int64_t)m->F / 16 * 8},
                  {&m->logit_keys, (int64_t)t->grid * WARPS * 8},
                  {&t->next_row, t->row_bytes},
                  {&m->grid, sizeof(struct grid_state)}};
    const int count = sizeof pieces / sizeof *pieces;
    int64_t total = 0;
    struct nbi_ptr block;
    for (int i = 0; i < count; i++)
        total += ceil_div(pieces[i].size, 256) * 256;
    NBI_TRY(t->s->cuda->be.alloc(&t->s->cuda->be, "token", total, &block));
    t->block = at<uint8_t>(block);
    uint8_t *next = t->block;
    for (int i = 0; i < count; i++) {
        *(uint8_t **)pieces[i].to = next;
        if (i < 5)
            CU_TRY(cudaMemcpyAsync(next, filled[i], (size_t)pieces[i].size, cudaMemcpyHostToDevice,
                                   t->s->queue));
        next += ceil_div(pieces[i].size, 256) * 256;
    }
    /* Not the whole device: another thread may be capturing a graph. */
    CU_TRY(cudaStreamSynchronize(t->s->queue));
    return NB_OK;
}

/* Gives all the shared memory that is left to keys and values of split attention. */
static enum nb_status fit_smem(struct nbi_megakernel *t)
{
    struct model *m = &t->m;
    int limit = 0, ctas = 0;
    const void *both[] = {t->kernel_short, t->kernel_split};
    struct cudaFuncAttributes code;
    CU_TRY(
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, t->s->cuda->index));
    m->kv_warp_bytes = 2 * TILE_KEYS * (int)nbi_dtype_bytes(m->kv_type, HEAD_DIM);
    m->kv_warps = 0;
    m->smem = smem_layout_of(*m);
    m->kv_warps = (limit - m->smem.total) / m->kv_warp_bytes;
    m->kv_warps = m->kv_warps < WARPS ? m->kv_warps : WARPS;
    m->smem = smem_layout_of(*m);
    t->smem_bytes = (size_t)m->smem.total;
    if (m->kv_warps < 1)
        return nbi_fail(NB_EUNSUPPORTED, "too little shared memory for the megakernel");
    for (int i = 0; i < 2; i++) {
        /* Code for older architectures has no bulk copies: the kernel returns at once. */
        CU_TRY(cudaFuncGetAttributes(&code, both[i]));
        if (code.ptxVersion < 90)
            return nbi_fail(NB_EUNSUPPORTED, "no code for this GPU");
        /* An attribute of the kernel, shared by all its users: never lower it. */
        CU_TRY(cudaFuncSetAttribute(both[i], cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
        CU_TRY(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, both[i], THREADS, t->smem_bytes));
        if (ctas < 1)
            return nbi_fail(NB_EUNSUPPORTED, "no room for the megakernel");
    }
    return NB_OK;
}

/* Everything of a new megakernel that can fail for this model. */
static enum nb_status prepare(struct nbi_megakernel *t, const struct nbi_megakernel_model *m,
                              const struct host_tables *tables)
{
    if (t->m.ctas_per_head < 1 || t->m.max_splits < 1)
        return nbi_fail(NB_EUNSUPPORTED, "too many heads for the megakernel");
    plan_ctas(tables->cta_plans, &t->m, (int)t->grid);
    measure_plans(&t->m, tables->cta_plans, (int)t->grid);
    if (t->m.row_pairs > 32767 || t->m.warp_row_pairs > 255)
        return nbi_fail(NB_EUNSUPPORTED, "too many rows for the megakernel");
    if (t->m.tile_cols[O] > SUM_COUNT_MAX || t->m.tile_cols[DOWN] > SUM_COUNT_MAX ||
        (unsigned)t->m.C > THREADS * t->grid)
        return nbi_fail(NB_EUNSUPPORTED, "too many columns for the megakernel");
    for (int64_t i = 0; i < m->layers; i++)
        NBI_TRY(fill_layer(t, tables, i, m));
    NBI_TRY(nbi_cuda_vector_read(t->s->cuda, &m->norm, tables->norms + 2 * m->layers * m->C));
    NBI_TRY(fit_smem(t));
    CU_TRY(cudaMallocHost(&t->mailbox, MAILBOX_WORDS * sizeof *t->mailbox));
    memset(t->mailbox, 0, MAILBOX_WORDS * sizeof *t->mailbox);
    return upload_tables(t, tables);
}

/* CTAs of a megakernel wait for each other, so all of them must be resident. Two megakernels that
 * each hold some multiprocessors would wait forever, whichever engines they belong to. A megakernel
 * may therefore start before the previous kernel ends only if it is the only one in this process.
 */
static struct {
    int count;                    /* of struct nbi_megakernel */
    pthread_mutex_t early_launch; /* held until an early kernel is resident */
} megakernels = {.count = 0, .early_launch = PTHREAD_MUTEX_INITIALIZER};

static bool is_only_megakernel(void)
{
    return __atomic_load_n(&megakernels.count, __ATOMIC_SEQ_CST) == 1;
}

/* Afterwards no other megakernel launches early, and one that just did is resident. */
static void register_megakernel(void)
{
    __atomic_fetch_add(&megakernels.count, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&megakernels.early_launch);
    pthread_mutex_unlock(&megakernels.early_launch);
}

void nbi_cuda_megakernel_free(struct nbi_megakernel *t)
{
    if (!t)
        return;
    __atomic_fetch_sub(&megakernels.count, 1, __ATOMIC_SEQ_CST);
    if (t->block)
        nbi_cuda_free(t->s->cuda, t->block);
    cudaFreeHost(t->mailbox);
    free(t);
}

enum nb_status nbi_cuda_megakernel_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                       struct nbi_megakernel **out)
{
    *out = NULL;
    if (s->cuda->cc < 90 || !is_supported(m))
        return NB_EUNSUPPORTED;
    struct nbi_megakernel *t = (struct nbi_megakernel *)calloc(1, sizeof *t);
    const struct host_tables tables = {
        (struct layer *)calloc((size_t)m->layers, sizeof(struct layer)),
        (struct tensor_map *)aligned_alloc(128, (size_t)m->layers * 2 * sizeof(struct tensor_map)),
        (struct cta_work *)calloc((size_t)s->cuda->sms * GEMVS, sizeof(struct cta_work)),
        (float *)calloc((size_t)((2 * m->layers + 1) * m->C), sizeof(float)),
        (float *)calloc((size_t)(m->layers * 2 * HEAD_DIM), sizeof(float))};
    bool ok =
        t && tables.layers && tables.kv_maps && tables.cta_plans && tables.norms && tables.qk_norms;
    enum nb_status rc = ok ? NB_OK : nbi_fail_memory("token", sizeof *t);
    if (t) {
        t->s = s;
        register_megakernel();
    }
    if (rc == NB_OK) {
        t->sum_round = FIRST_ROUND;
        t->grid = (unsigned)s->cuda->sms;
        t->embed = at<uint8_t>(m->embed.data);
        t->row_bytes = (int64_t)nbi_dtype_bytes(m->embed.dtype, m->C);
        t->embed_on_host = nbi_cuda_on_host(s->cuda, &m->embed);
        if (t->embed_on_host && t->row_bytes > EMBED_ROW_MAX)
            rc = nbi_fail(NB_EUNSUPPORTED, "rows are too long for the megakernel");
        fill_model(&t->m, m, s->cuda->sms);
        if (t->m.kv_type == NBI_F16)
            choose_kernels<NBI_F16>(t);
        else if (t->m.kv_type == NBI_BF16)
            choose_kernels<NBI_BF16>(t);
        else
            choose_kernels<NBI_E4M3>(t);
        if (rc == NB_OK)
            rc = prepare(t, m, &tables);
    }
    free(tables.layers);
    free(tables.kv_maps);
    free(tables.cta_plans);
    free(tables.norms);
    free(tables.qk_norms);
    if (rc == NB_OK)
        *out = t;
    else
        nbi_cuda_megakernel_free(t);
    return rc;
}

/* ---- running ---- */

/* Queues the kernel of one token. row: the embedding row on the device, or NULL for t->row. early:
 * its CTAs may start before the previous kernel ends. */
static enum nb_status launch_step(struct nbi_megakernel *t, const struct nbi_megakernel_step *step,
                                  const void *row, bool early)
{
    struct step_args a = {row,        step->position, step->kv_row, step->first,
                          step->last, t->epoch,       t->sum_round, at<float>(step->logits)};
    void *args[] = {&t->m, &a, &t->row};
    cudaLaunchAttribute attrs[2] = {};
    cudaLaunchConfig_t c = {};
    attrs[0].id = cudaLaunchAttributeCooperative;
    attrs[0].val.cooperative = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(t->grid);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = t->smem_bytes;
    c.stream = t->s->queue;
    c.attrs = attrs;
    c.numAttrs = early ? 2 : 1;
    bool is_short = step->last - step->first <= SHORT_CONTEXT_KEYS;
    CU_TRY(cudaLaunchKernelExC(&c, is_short ? t->kernel_short : t->kernel_split, args));
    /* Two rounds of sums, and so two arrivals of each CTA, a layer. */
    t->epoch += t->grid * (unsigned)(2 * t->m.layer_count);
    t->sum_round += 2 * (unsigned)t->m.layer_count;
    return NB_OK;
}

enum nb_status nbi_cuda_megakernel_run(struct nbi_megakernel *t,
                                       const struct nbi_megakernel_step *step)
{
    const uint8_t *row = t->embed + step->id * t->row_bytes;
    CU_HERE(t->s);
    if (t->embed_on_host)
        memcpy(t->row.bytes, row, (size_t)t->row_bytes);
    return launch_step(t, step, t->embed_on_host ? NULL : row, false);
}

/* Polls the mailbox until its first `count` words have the current tag. Now and then it asks for
 * the state of the stream, so that a failed kernel does not leave the host waiting forever. */
static enum nb_status host_wait(const struct nbi_megakernel *t, uint32_t *message, int count)
{
    const volatile uint64_t *mailbox = t->mailbox;
    bool over = false;
    int received = 0;
    for (int64_t i = 1;; i++) {
        while (received < count) {
            uint64_t word = mailbox[received];
            if (word >> 32 != t->tag)
                break;
            message[received++] = (uint32_t)word;
        }
        if (received == count)
            return NB_OK;
        if (over)
            return nbi_fail(NB_EDEVICE, "the GPU did not say which token is the best");
        if (i % POLLS_PER_QUERY != 0)
            continue;
        cudaError_t rc = cudaStreamQuery(t->s->queue);
        over = rc == cudaSuccess;
        if (rc == cudaErrorNotReady)
            cudaGetLastError();
        else
            CU_TRY(rc);
    }
}

/* Queues the choice of the next token and its kernel, then waits for the choice. */
static enum nb_status launch_ahead(struct nbi_megakernel *t, const struct nbi_megakernel_step *step,
                                   const struct nbi_run_ahead *f, bool early, uint32_t *message)
{
    CU_HERE(t->s);
    const struct next_token to = {t->mailbox, t->next_row, (const uint4 *)t->embed,
                                  (int)(t->row_bytes / (int64_t)sizeof(uint4)), ++t->tag};
    if (f->k == 1)
        CU_TRY(pdl_launch(t->s, k_argmax_next, 1u, THREADS, 0, to, t->m.logit_keys,
                          (int)t->grid * WARPS));
    else
        CU_TRY(pdl_launch(t->s, k_sample_next, 1u, THREADS, 0, to, at<int32_t>(f->topk), (int)f->k,
                          f->draw));
    NBI_TRY(launch_step(t, step, t->next_row, early));
    return host_wait(t, message, 1 + 2 * (int)f->k);
}

enum nb_status nbi_cuda_megakernel_run_ahead(struct nbi_megakernel *t,
                                             const struct nbi_megakernel_step *step,
                                             struct nbi_run_ahead *f)
{
    const bool early = is_only_megakernel();
    uint32_t message[MAILBOX_WORDS];
    NBI_BUG_IF(f->k < 1 || f->k > NBI_TOPK_MAX);
    if (early)
        pthread_mutex_lock(&megakernels.early_launch);
    enum nb_status rc = launch_ahead(t, step, f, early && is_only_megakernel(), message);
    if (early)
        pthread_mutex_unlock(&megakernels.early_launch);
    NBI_TRY(rc);
    f->nonfinite = message[0] == MAILBOX_NONFINITE;
    f->id = f->nonfinite ? 0 : (int32_t)message[0];
    for (int64_t i = 0; i < f->k; i++) {
        f->candidates[i].id = (int32_t)message[1 + i];
        memcpy(&f->candidates[i].logit, &message[1 + f->k + i], sizeof f->candidates[i].logit);
    }
    return NB_OK;
}
