/* megakernel.cu - one token through the whole model in one kernel.
 *
 * Decoding reads every weight once and does little else, so nothing may keep the memory waiting.
 * One block stays on each multiprocessor. Each of its warps has a ring of tiles in shared memory
 * and asks for another as soon as it has read one, in the order in which it will want them, across
 * the ends of products and layers: while blocks wait for each other, norms are taken or attention
 * runs, the next weights are on their way already.
 *
 * A layer is four steps: q, k, v; attention and o; gate and up; down. Nothing is waited for but
 * values themselves. What comes of q, k, v, of attention over many rows, of gate and up is needed
 * by few blocks: it goes with a tag, and who needs it reads until the tag is right. What comes of o
 * and down is needed by all: sums count what was added to them, and who needs them reads until they
 * are complete. Places are used again, so blocks also say when they have read what was there.
 *
 * In o a block has the columns of one head, so that it needs nothing but that head. What blocks
 * make of the rows of o and down is added up in integers, which come out the same in any order.
 * Every block keeps the residual stream for itself and does the norms by itself.
 *
 * A product takes x in f16, each 16 columns times a power of two. The operand B of mma.m16n8k16 has
 * eight columns and there is one x: column b has x of block b of the tile alone, so that the sums
 * come out by blocks, and scales of weights and x need be applied only once for 16 columns.
 *
 * Who wants the best to follow gets them while one of them is computed: k_follow finds the best, or
 * k_follow_drawn draws one, and says so to the host, and the next kernel is there before the host
 * has heard of it. */
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/megakernel_attention_split.cuh"

#define TOLD_ODD   0xFFFFFFFFu /* in place of an id: a logit was not finite */
#define HEAR_TRIES 8192

/* ---- the kernel ---- */

/* A map that the host has written is used from now on. */
__device__ static inline void know_map(const struct store_map *map)
{
#if HAS_BULK_COPY
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
#endif
}

/* What does not change: layers, what the block and its warps have of each step. */
__device__ static void begin_block(struct context &c)
{
    const uint32_t *from = (const uint32_t *)c.m.layers;
    int words = c.m.layer_count * (int)sizeof(struct layer) / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t *)c.layers())[i] = from[i];
    if (threadIdx.x < STEPS)
        c.own()[threadIdx.x] = c.m.parts[threadIdx.x * gridDim.x + blockIdx.x];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < STEPS * c.m.line_count; i += THREADS) {
        int step = i / c.m.line_count, line = i - step * c.m.line_count;
        const struct part own = c.own()[step];
        if (line < lines_of(own))
            c.lines()[i] = line_of(c.m, own, step, line);
    }
    if (threadIdx.x < STEPS * WARPS) {
        int step = threadIdx.x / WARPS;
        const struct part own = c.own()[step];
        struct range r = range_of(own, threadIdx.x % WARPS);
        int line = r.begin / max(own.cols, 1);
        c.work()[threadIdx.x] = {(short)line, (short)(r.begin - line * own.cols), r.end - r.begin};
    }
    if (threadIdx.x < WARPS * RING)
        mbarrier_init(smem_addr(c.full() + threadIdx.x), 1);
    if (threadIdx.x < WARPS * 2)
        mbarrier_init(smem_addr(c.arrived() + threadIdx.x), 1);
    if (threadIdx.x < 4)
        c.zeros()[threadIdx.x] = make_uint4(0, 0, 0, 0);
#if HAS_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncthreads();
}

/* How many rows each block has in attention, as evenly as can be, and how many blocks have some.
 * This token's own row does not count; the last of those blocks has it too. */
__device__ static inline int rows_each(const struct model &m, int old, int *used)
{
    int splits = min(max((old + SPLIT_ROWS - 1) / SPLIT_ROWS, 1), m.splits);
    int each = max((old + splits - 1) / splits, 1);
    *used = max((old + each - 1) / each, 1);
    return each;
}

__device__ static struct rows_part share_rows(const struct model &m, const struct step_args &a)
{
    int old = a.last - a.first, share = m.NH / m.NKV, groups = m.NH / m.together;
    struct rows_part p = {0, 1, (int)blockIdx.x / m.each, 0, a.first, a.last};
    if (old > FEW_ROWS) {
        int each = rows_each(m, old, &p.used);
        p.split = (int)blockIdx.x / groups;
        p.head = (int)blockIdx.x % groups * m.together;
        p.begin = min(a.first + p.split * each, a.last);
        p.end = min(p.begin + each, a.last);
    }
    p.kv = min(p.head, m.NH - 1) / share;
    return p;
}

__device__ static void begin_position(struct context &c, int position)
{
    if (threadIdx.x < HEAD / 2) {
        double sn, cs;
        sincos((double)((float)position * c.m.frequency[threadIdx.x]), &sn, &cs);
        c.turn()[threadIdx.x] = (float)cs * c.m.rope_scale;
        c.turn()[HEAD / 2 + threadIdx.x] = (float)sn * c.m.rope_scale;
    }
}

#define AT_ONCE 3 /* values of the embedding that a thread asks for */

__device__ static void begin_token(struct context &c, const struct step_args &a,
                                   const struct row &row)
{
    const void *from = a.row ? a.row : row.bytes;
#pragma unroll 1
    for (int i = threadIdx.x; i < c.m.C; i += AT_ONCE * THREADS) {
        float x[AT_ONCE];
        load_f32_n<AT_ONCE>(x, from, i, THREADS, c.m.C, c.m.embed_type);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * THREADS < c.m.C)
                ((float *)c.x())[i + j * THREADS] = x[j];
    }
    __syncthreads();
}

/* Everything of a step, up to where blocks say that they have read what they need. */
template <enum nbi_dtype T, int G, bool FEW>
__device__ static void do_step(struct context &c, int step, int layer, const struct step_args &a,
                               const struct rows_part &p, struct norm_feed norms)
{
    if (step == O)
        attention<T, G, FEW>(c, layer, a, p);
    else if (step == DOWN)
        put_act(c);
    else
        put_normed(c, step == GATE_UP || layer > 0, 2 * layer + (step == GATE_UP), norms);
    __syncthreads();
    if (!FEW)
        ask_early<T>(c, step, layer, p);
    if (step == QKV && FEW)
        prefetch_rows<T>(c, layer, p);
    if ((step == QKV || step == GATE_UP) && threadIdx.x * 32 < c.m.C) /* the next norm */
        prefetch(c.m.norms + (2 * layer + 1 + (step == GATE_UP)) * (int64_t)c.m.C +
                 threadIdx.x * 32);
    multiply(c, step,
             step == O      ? c.layers()[layer].scale[O_]
             : step == DOWN ? c.layers()[layer].scale[DOWN_]
                            : 1);
    if (step != O && step != DOWN) {
        __syncthreads();
        finish(c, step, min(layer, c.m.layer_count - 1), a.logits);
    }
}

template <enum nbi_dtype T, int G, bool FEW>
__global__ static void __launch_bounds__(THREADS, 1)
    k_token(const __grid_constant__ struct model m, const __grid_constant__ struct step_args a,
            const __grid_constant__ struct row row)
{
    if (!HAS_BULK_COPY)
        return;
    struct context c = {
        m, a.epoch, a.round, a.epoch + 1, (int)threadIdx.x / 32, (int)threadIdx.x % 32};
    /* Where some have a unit more than others, those are warps of different schedulers. */
    c.share = c.warp % 4 * (WARPS / 4) + c.warp / 4;
    c.ring_at = smem_addr(c.ring() + c.warp * RING * STAGE_BYTES);
    c.full_at = smem_addr(c.full() + c.warp * RING);
    c.tile_at = c.ring_at;
    c.bar_at = c.full_at;
    c.feed.step = -1;
#pragma unroll 1
    for (int i = threadIdx.x; !FEW && i < 2 * m.layer_count; i += THREADS)
        know_map(m.maps + i);
    begin_block(c);
    feed_on(c, c.feed);
#pragma unroll 1
    for (int i = 0; i < RING; i++)
        fetch_stage(c, c.ring_at + i * STAGE_BYTES, c.full_at + i * 8);
    const struct rows_part p = share_rows(m, a);
    struct norm_feed norms = norms_at(c, 0, threadIdx.x);
    begin_position(c, a.position);
    pdl_wait();
    begin_token(c, a, row);
#pragma unroll 1
    for (int layer = 0, step = QKV;;) {
        do_step<T, G, FEW>(c, step, layer, a, p, norms);
        if (step == LOGITS)
            break;
        if (step == O || step == DOWN) {
            arrive_all(c);
            norms = norms_at(c, 2 * layer + 1 + (step == DOWN), threadIdx.x);
            c.round++;
        }
        step = step < DOWN ? step + 1 : QKV;
        layer += step == QKV;
        if (layer == m.layer_count)
            step = LOGITS;
    }
}

/* ---- the token to follow ---- */

/* Where its row of the embedding is to go, and what the host is to hear, each word with a tag: the
 * id, then the ids and the values of the best. */
struct follower {
    uint64_t *told;
    uint4 *row;
    const uint4 *embed;
    int row_words;
    uint32_t tag;
};

#define TOLD_MAX (1 + 2 * NBI_TOPK_MAX)

__device__ static inline void tell(const struct follower &f, int i, uint32_t word)
{
    f.told[i] = (uint64_t)f.tag << 32 | word;
}

__device__ static inline void fetch_row(const struct follower &f, int id)
{
    for (int i = threadIdx.x; i < f.row_words; i += THREADS)
        f.row[i] = f.embed[(int64_t)id * f.row_words + i];
}

/* The best of some keys. */
__global__ static void k_follow(const struct follower f, const uint64_t *keys, int count)
{
    uint64_t best = 0;
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x; i < count; i += THREADS)
        best = max(best, keys[i]);
    best = block_best(best);
    bool odd = best == NONFINITE_KEY;
    int id = odd ? 0 : id_of(best);
    fetch_row(f, id);
    if (threadIdx.x == 0) {
        tell(f, 0, odd ? TOLD_ODD : (uint32_t)id);
        tell(f, 1, (uint32_t)id);
        tell(f, 2, __float_as_uint(value_of(best)));
    }
}

/* Numbers of a warp, two of a lane, added up in order: those of all lanes first, then the others.
 */
__device__ static inline void add_in_order(int64_t v[2])
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

/* The first of those sums that is larger than `at`. */
__device__ static inline int first_above(const int64_t sums[2], int64_t at)
{
    unsigned low = __ballot_sync(0xFFFFFFFF, sums[0] > at),
             high = __ballot_sync(0xFFFFFFFF, sums[1] > at);
    return low ? __ffs(low) - 1 : 31 + __ffs(high);
}

/* By a warp: which of J, best first, is drawn. As infer/sampler.c has it, but for the last bits of
 * e^x: the host draws by itself, and what comes of another guess is not used. */
__device__ static int drawn(const struct nbi_draw &d, const float *values, int J)
{
    int lane = threadIdx.x % 32;
    int64_t sums[2], left[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = lane + 32 * i;
        double x = at < J ? ((double)values[at] - (double)values[0]) * d.inv_temperature : -100;
        sums[i] = x < -50 ? 0 : (int64_t)(expf((float)x) * d.unit);
        left[i] = x >= d.log_min_p ? sums[i] : 0;
    }
    add_in_order(sums);
    add_in_order(left);
    int64_t all = __shfl_sync(0xFFFFFFFF, sums[1], 31),
            likely = __shfl_sync(0xFFFFFFFF, left[1], 31);
    double wanted = ceil(d.top_p * (double)all);
    int64_t top_p = d.top_p == 1 || wanted >= (double)all ? all : wanted < 1 ? 1 : (int64_t)wanted;
    int last = first_above(sums, top_p - 1);
    int64_t end = __shfl_sync(0xFFFFFFFF, last < 32 ? sums[0] : sums[1], last % 32);
    return first_above(sums, (int64_t)__umul64hi(d.uniform, (uint64_t)min(end, likely)));
}

/* One of the best, as `top` left them. */
__global__ static void k_follow_drawn(const struct follower f, const int32_t *top, int J,
                                      const struct nbi_draw d)
{
    __shared__ int which;
    const int32_t *ids = top + 1, *values = ids + J;
    pdl_trigger();
    pdl_wait();
    bool odd = top[0];
    if (threadIdx.x < 32) {
        int i = odd ? 0 : drawn(d, (const float *)values, J);
        if (threadIdx.x == 0)
            which = i;
    }
    __syncthreads();
    int id = odd ? 0 : ids[which];
    fetch_row(f, id);
    for (int i = threadIdx.x; i < 2 * J; i += THREADS)
        tell(f, 1 + i, (uint32_t)ids[i]);
    if (threadIdx.x == 0)
        tell(f, 0, odd ? TOLD_ODD : (uint32_t)id);
}

/* ---- the host's part ---- */

struct nbi_megakernel {
    struct nbi_stream *s;
    struct model m;
    uint8_t *block;
    const uint8_t *embed; /* the embedding */
    int64_t row_bytes;    /* of it */
    bool far;             /* it is on the host: this token's row goes with the launch */
    struct row row;
    uint4 *next;    /* on the device: the row of a token that the host does not know yet */
    uint64_t *told; /* [TOLD_MAX], pinned: what a follower has to say */
    uint32_t tag;   /* of the last one */
    unsigned epoch, grid;
    unsigned round; /* of sums */
    size_t shared;
    const void *few, *many; /* the kernel, over few and many rows */
};

typedef void (*token_kernel)(struct model, struct step_args, struct row);

template <enum nbi_dtype T> static void choose_kernels(struct nbi_megakernel *t)
{
    int G = t->m.together;
    t->few = (const void *)(token_kernel)k_token<T, 1, true>;
    t->many = G == 4   ? (const void *)(token_kernel)k_token<T, 4, false>
              : G == 2 ? (const void *)(token_kernel)k_token<T, 2, false>
                       : (const void *)(token_kernel)k_token<T, 1, false>;
}

static bool is_tiles(const struct nbi_weight *w)
{
    return w->dtype == NBI_NVFP4 && w->layout == NBI_WEIGHT_TILES;
}

static bool fits(const struct nbi_megakernel_model *m)
{
    enum nbi_dtype embed = m->embed.dtype;
    bool ok = m->D == HEAD && m->C % 16 == 0 && m->F % 16 == 0 && is_tiles(&m->head) &&
              m->kv[0].dtype != NBI_F32 &&
              (embed == NBI_F32 || embed == NBI_F16 || embed == NBI_BF16);
    for (int64_t i = 0; i < m->layers; i++) {
        const struct nbi_layer_weights *l = &m->layer[i];
        const struct nbi_weight *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < 7; j++)
            ok = ok && is_tiles(all[j]);
    }
    return ok;
}

/* ---- who has what ---- */

/* [0, count) as evenly as can be. */
static struct range even(int64_t count, int i, int of)
{
    return {(int)(count * i / of), (int)(count * (i + 1) / of)};
}

/* The same, with two together where that can be. */
static struct range even_pairs(int count, int i, int of)
{
    struct range r = even(ceil_div(count, PAIR), i, of);
    return {PAIR * r.begin, PAIR * r.end < count ? PAIR * r.end : count};
}

static void make_parts(struct part *all, const struct model *m, int blocks)
{
    int qkv = (m->NH + 2 * m->NKV) * HEAD / 16, rows = m->C / 16;
    int pairs = (int)ceil_div(rows, PAIR);
    /* Many slices, since a block has its columns of x in shared memory. */
    int slices = choose_split_k(pairs, m->tile_cols[DOWN], blocks, WARPS, true);
    int groups = blocks / slices;
    for (int b = 0; b < blocks; b++) {
        struct part p[STEPS] = {};
        struct range r = even(qkv, b, blocks);
        p[QKV] = {r.begin, r.end - r.begin, 0, m->tile_cols[QKV]};
        if (b / m->each < m->NH) {
            r = even_pairs(rows, b % m->each, m->each);
            p[O] = {r.begin, r.end - r.begin, b / m->each, 1};
        }
        r = even(m->F / 16, b, blocks);
        p[GATE_UP] = {2 * r.begin, 2 * (r.end - r.begin), 0, m->tile_cols[GATE_UP]};
        if (b < slices * groups) {
            struct range c = even(m->tile_cols[DOWN], b / groups, slices);
            r = even_pairs(rows, b % groups, groups);
            p[DOWN] = {r.begin, r.end - r.begin, c.begin, c.end - c.begin};
        }
        r = even(ceil_div(m->V, 16), b, blocks);
        p[LOGITS] = {r.begin, r.end - r.begin, 0, m->tile_cols[LOGITS]};
        for (int i = 0; i < STEPS; i++)
            all[i * blocks + b] = p[i];
    }
}

/* Sizes that follow from who has what. */
static void measure_parts(struct model *m, const struct part *all, int blocks)
{
    m->slots = m->line_count = 1;
    m->longest = m->tile_cols[QKV] * CUDA_TILE_COLS;
    for (int i = 0; i < STEPS * blocks; i++) {
        const struct part *p = &all[i];
        m->line_count = lines_of(*p) > m->line_count ? lines_of(*p) : m->line_count;
        if (p->cols * CUDA_TILE_COLS > m->longest)
            m->longest = p->cols * CUDA_TILE_COLS;
        for (int w = 0; w < WARPS; w++) {
            struct range r = range_of(*p, w);
            int lines = r.end > r.begin ? (r.end - 1) / p->cols - r.begin / p->cols + 1 : 0;
            if (i / blocks != O && i / blocks != DOWN && lines > m->slots)
                m->slots = lines;
        }
    }
}

/* What place copies to the device. */
struct tables {
    struct layer *layers;
    struct store_map *maps;
    struct part *parts;
    float *norms, *head_norms;
};

/* Rows of a store are not counted here: nobody asks for one that is not there. */
static enum nb_status map_store(const struct model *m, void *rows, struct store_map *out)
{
    static_assert(sizeof(CUtensorMap) == sizeof *out, "a map");
    int size = (int)nbi_dtype_bytes(m->store, 1);
    const cuuint64_t dims[2] = {(cuuint64_t)m->NKV * HEAD, 1 << 30},
                     strides[1] = {(cuuint64_t)m->NKV * HEAD * size};
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
    return rc == CUDA_SUCCESS
               ? NB_OK
               : nbi_fail(NB_EUNSUPPORTED, "keys and values that copies of boxes do not suit");
}

static enum nb_status fill_layer(struct nbi_megakernel *t, const struct tables *to, int64_t i,
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
    NBI_TRY(map_store(&t->m, out->k, to->maps + 2 * i));
    NBI_TRY(map_store(&t->m, out->v, to->maps + 2 * i + 1));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->input_norm, to->norms + 2 * i * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->post_norm, to->norms + (2 * i + 1) * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->q_norm, to->head_norms + 2 * i * HEAD));
    return nbi_cuda_vector_read(cuda, &l->k_norm, to->head_norms + (2 * i + 1) * HEAD);
}

static void describe(struct model *m, const struct nbi_megakernel_model *t, int sms)
{
    int share = (int)(t->NH / t->NKV);
    m->together = share % 4 == 0 ? 4 : share % 2 == 0 ? 2 : 1;
    m->layer_count = (int)t->layers;
    m->C = (int)t->C;
    m->F = (int)t->F;
    m->NH = (int)t->NH;
    m->NKV = (int)t->NKV;
    m->V = (int)t->V;
    m->tile_cols[QKV] = m->tile_cols[GATE_UP] = m->tile_cols[LOGITS] = tiles_of(1, t->C).cols;
    m->tile_cols[O] = tiles_of(1, t->NH * HEAD).cols;
    m->tile_cols[DOWN] = tiles_of(1, t->F).cols;
    m->splits = sms / (m->NH / m->together) < SPLITS_MAX ? sms / (m->NH / m->together) : SPLITS_MAX;
    m->each = sms / m->NH;
    m->q_end = m->NH * HEAD / CUDA_TILE_ROWS;
    m->k_end = m->q_end + m->NKV * HEAD / CUDA_TILE_ROWS;
    m->embed_type = t->embed.dtype;
    m->store = t->kv[0].dtype;
    m->frequency = at<float>(t->frequency);
    m->rope_scale = t->rope_scale;
    m->share = 1 / (float)t->C;
    m->eps = t->eps;
}

/* Tables and vectors in one block; the first five are filled from the host. */
static enum nb_status place(struct nbi_megakernel *t, const struct tables *from)
{
    struct model *m = &t->m;
    int64_t q = (int64_t)(m->NH + 2 * m->NKV) * HEAD;
    const void *filled[5] = {from->layers, from->maps, from->parts, from->norms, from->head_norms};
    const struct {
        void *to;
        int64_t size;
    } pieces[] = {{&m->layers, (int64_t)sizeof(struct layer) * m->layer_count},
                  {&m->maps, (int64_t)sizeof(struct store_map) * 2 * m->layer_count},
                  {&m->parts, (int64_t)sizeof(struct part) * STEPS * t->grid},
                  {&m->norms, (int64_t)(2 * m->layer_count + 1) * m->C * 4},
                  {&m->head_norms, (int64_t)m->layer_count * 2 * HEAD * 4},
                  {&m->qkv, q * 8},
                  {&m->shared, (int64_t)m->NH * SPLITS_MAX * PART_FLOATS * 8},
                  {&m->sums[0], (int64_t)m->C * 8},
                  {&m->sums[1], (int64_t)m->C * 8},
                  {&m->sums[2], (int64_t)m->C * 8},
                  {&m->sums[3], (int64_t)m->C * 8},
                  {&m->act, (int64_t)m->F / 2 * 8},
                  {&m->act_scale, (int64_t)m->F / 16 * 8},
                  {&m->best, (int64_t)t->grid * WARPS * 8},
                  {&t->next, t->row_bytes},
                  {&m->news, sizeof(struct news)}};
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
    CU_TRY(cudaStreamSynchronize(t->s->queue)); /* not the device: another thread may record */
    return NB_OK;
}

static enum nb_status size_shared(struct nbi_megakernel *t)
{
    struct model *m = &t->m;
    int most = 0, blocks = 0;
    const void *both[] = {t->few, t->many};
    struct cudaFuncAttributes code;
    CU_TRY(
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, t->s->cuda->index));
    /* All that fits is of use. */
    m->slot_pair = 2 * TILE_KEYS * (int)nbi_dtype_bytes(m->store, HEAD);
    m->readers = 0;
    m->at = places_of(*m);
    m->readers = (most - m->at.total) / m->slot_pair;
    m->readers = m->readers < WARPS ? m->readers : WARPS;
    m->at = places_of(*m);
    t->shared = (size_t)m->at.total;
    if (m->readers < 1)
        return nbi_fail(NB_EUNSUPPORTED, "too little shared memory for one kernel a token");
    for (int i = 0; i < 2; i++) {
        /* Made from code for older cards, the kernel has no bulk copies and does nothing. */
        CU_TRY(cudaFuncGetAttributes(&code, both[i]));
        if (code.ptxVersion < 90)
            return nbi_fail(NB_EUNSUPPORTED, "no code for this GPU");
        /* Of the kernel, so of all its users. */
        CU_TRY(cudaFuncSetAttribute(both[i], cudaFuncAttributeMaxDynamicSharedMemorySize, most));
        CU_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, both[i], THREADS, t->shared));
        if (blocks < 1)
            return nbi_fail(NB_EUNSUPPORTED, "no room for one kernel a token");
    }
    return NB_OK;
}

static enum nb_status fill_token(struct nbi_megakernel *t, const struct nbi_megakernel_model *m,
                                 const struct tables *tables)
{
    if (t->m.each < 1 || t->m.splits < 1)
        return nbi_fail(NB_EUNSUPPORTED, "more heads than one kernel a token suits");
    make_parts(tables->parts, &t->m, (int)t->grid);
    measure_parts(&t->m, tables->parts, (int)t->grid);
    if (t->m.line_count > 32767 || t->m.slots > 255)
        return nbi_fail(NB_EUNSUPPORTED, "more rows than one kernel a token suits");
    if (t->m.tile_cols[O] > SUM_TILES || t->m.tile_cols[DOWN] > SUM_TILES ||
        (unsigned)t->m.C > THREADS * t->grid)
        return nbi_fail(NB_EUNSUPPORTED, "more columns than one kernel a token suits");
    for (int64_t i = 0; i < m->layers; i++)
        NBI_TRY(fill_layer(t, tables, i, m));
    NBI_TRY(nbi_cuda_vector_read(t->s->cuda, &m->norm, tables->norms + 2 * m->layers * m->C));
    NBI_TRY(size_shared(t));
    CU_TRY(cudaMallocHost(&t->told, TOLD_MAX * sizeof *t->told));
    memset(t->told, 0, TOLD_MAX * sizeof *t->told);
    return place(t, tables);
}

/* Blocks of a kernel wait for each other, so those of two must not share the multiprocessors, of
 * whichever engine they are. A kernel may start early, before the one before it has ended, if there
 * is nobody else in this process. */
static struct {
    int tokens;            /* struct nbi_megakernel that there are */
    pthread_mutex_t early; /* held until a kernel that starts early has its place */
} others = {.early = PTHREAD_MUTEX_INITIALIZER};

static bool alone(void)
{
    return __atomic_load_n(&others.tokens, __ATOMIC_SEQ_CST) == 1;
}

/* From now on nobody is alone, and who was is done with it. */
static void meet_others(void)
{
    __atomic_fetch_add(&others.tokens, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&others.early);
    pthread_mutex_unlock(&others.early);
}

void nbi_cuda_megakernel_free(struct nbi_megakernel *t)
{
    if (!t)
        return;
    __atomic_fetch_sub(&others.tokens, 1, __ATOMIC_SEQ_CST);
    cudaFree(t->block);
    cudaFreeHost(t->told);
    free(t);
}

enum nb_status nbi_cuda_megakernel_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                       struct nbi_megakernel **out)
{
    *out = NULL;
    if (s->cuda->cc < 90 || !fits(m))
        return NB_EUNSUPPORTED;
    struct nbi_megakernel *t = (struct nbi_megakernel *)calloc(1, sizeof *t);
    const struct tables tables = {
        (struct layer *)calloc((size_t)m->layers, sizeof(struct layer)),
        (struct store_map *)aligned_alloc(128, (size_t)m->layers * 2 * sizeof(struct store_map)),
        (struct part *)calloc((size_t)s->cuda->sms * STEPS, sizeof(struct part)),
        (float *)calloc((size_t)((2 * m->layers + 1) * m->C), sizeof(float)),
        (float *)calloc((size_t)(m->layers * 2 * HEAD), sizeof(float))};
    bool there =
        t && tables.layers && tables.maps && tables.parts && tables.norms && tables.head_norms;
    enum nb_status rc = there ? NB_OK : nbi_fail_memory("token", sizeof *t);
    if (t) {
        t->s = s;
        meet_others();
    }
    if (rc == NB_OK) {
        t->round = FIRST_ROUND;
        t->grid = (unsigned)s->cuda->sms;
        t->embed = at<uint8_t>(m->embed.data);
        t->row_bytes = (int64_t)nbi_dtype_bytes(m->embed.dtype, m->C);
        t->far = nbi_cuda_on_host(s->cuda, &m->embed);
        if (t->far && t->row_bytes > ROW_MAX)
            rc = nbi_fail(NB_EUNSUPPORTED, "longer rows than one kernel a token suits");
        describe(&t->m, m, s->cuda->sms);
        if (t->m.store == NBI_F16)
            choose_kernels<NBI_F16>(t);
        else if (t->m.store == NBI_BF16)
            choose_kernels<NBI_BF16>(t);
        else
            choose_kernels<NBI_E4M3>(t);
        if (rc == NB_OK)
            rc = fill_token(t, m, &tables);
    }
    free(tables.layers);
    free(tables.maps);
    free(tables.parts);
    free(tables.norms);
    free(tables.head_norms);
    if (rc == NB_OK)
        *out = t;
    else
        nbi_cuda_megakernel_free(t);
    return rc;
}

/* With the row of the embedding that lies there, or that goes with the launch. If `early`, blocks
 * come as soon as there is room for them. */
static enum nb_status run(struct nbi_megakernel *t, const struct nbi_megakernel_step *step,
                          const void *row, bool early)
{
    struct step_args a = {row,        step->position, step->kv_row, step->first,
                          step->last, t->epoch,       t->round,     at<float>(step->logits)};
    void *args[] = {&t->m, &a, &t->row};
    cudaLaunchAttribute attrs[2] = {};
    cudaLaunchConfig_t c = {};
    attrs[0].id = cudaLaunchAttributeCooperative;
    attrs[0].val.cooperative = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(t->grid);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = t->shared;
    c.stream = t->s->queue;
    c.attrs = attrs;
    c.numAttrs = early ? 2 : 1;
    bool few = step->last - step->first <= FEW_ROWS;
    CU_TRY(cudaLaunchKernelExC(&c, few ? t->few : t->many, args));
    /* Two rounds a layer. */
    t->epoch += t->grid * (unsigned)(2 * t->m.layer_count);
    t->round += 2 * (unsigned)t->m.layer_count;
    t->s->best = {a.logits, t->m.V, t->m.best, (int)t->grid * WARPS};
    return NB_OK;
}

enum nb_status nbi_cuda_megakernel_run(struct nbi_megakernel *t,
                                       const struct nbi_megakernel_step *step)
{
    const uint8_t *row = t->embed + step->id * t->row_bytes;
    CU_HERE(t->s);
    if (t->far)
        memcpy(t->row.bytes, row, (size_t)t->row_bytes);
    return run(t, step, t->far ? NULL : row, false);
}

/* Reads `count` words until all have the tag of now; asks how the device is now and then. */
static enum nb_status hear(const struct nbi_megakernel *t, uint32_t *said, int count)
{
    const volatile uint64_t *told = t->told;
    bool over = false;
    int heard = 0;
    for (int64_t i = 1;; i++) {
        while (heard < count) {
            uint64_t word = told[heard];
            if (word >> 32 != t->tag)
                break;
            said[heard++] = (uint32_t)word;
        }
        if (heard == count)
            return NB_OK;
        if (over)
            return nbi_fail(NB_EDEVICE, "the GPU did not say which token is the best");
        if (i % HEAR_TRIES != 0)
            continue;
        cudaError_t rc = cudaStreamQuery(t->s->queue);
        over = rc == cudaSuccess;
        if (rc == cudaErrorNotReady)
            cudaGetLastError();
        else
            CU_TRY(rc);
    }
}

static enum nb_status follow(struct nbi_megakernel *t, const struct nbi_megakernel_step *step,
                             const struct nbi_run_ahead *f, bool early, uint32_t *said)
{
    CU_HERE(t->s);
    const struct follower to = {t->told, t->next, (const uint4 *)t->embed,
                                (int)(t->row_bytes / (int64_t)sizeof(uint4)), ++t->tag};
    if (f->k == 1)
        CU_TRY(pdl_launch(t->s, k_follow, 1u, THREADS, 0, to, t->m.best, (int)t->grid * WARPS));
    else
        CU_TRY(pdl_launch(t->s, k_follow_drawn, 1u, THREADS, 0, to, at<int32_t>(f->topk), (int)f->k,
                          f->draw));
    NBI_TRY(run(t, step, t->next, early));
    return hear(t, said, 1 + 2 * (int)f->k);
}

enum nb_status nbi_cuda_megakernel_run_ahead(struct nbi_megakernel *t,
                                             const struct nbi_megakernel_step *step,
                                             struct nbi_run_ahead *f)
{
    const bool early = alone();
    uint32_t said[TOLD_MAX];
    NBI_BUG_IF(f->k < 1 || f->k > NBI_TOPK_MAX);
    if (early)
        pthread_mutex_lock(&others.early);
    enum nb_status rc = follow(t, step, f, early && alone(), said);
    if (early)
        pthread_mutex_unlock(&others.early);
    NBI_TRY(rc);
    f->nonfinite = said[0] == TOLD_ODD;
    f->id = f->nonfinite ? 0 : (int32_t)said[0];
    for (int64_t i = 0; i < f->k; i++) {
        f->candidates[i].id = (int32_t)said[1 + i];
        memcpy(&f->candidates[i].logit, &said[1 + f->k + i], sizeof f->candidates[i].logit);
    }
    return NB_OK;
}
