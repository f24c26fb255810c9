/* token.cu - one token through the whole model in one kernel.
 *
 * Decoding reads every weight once and does little else, so nothing may keep the memory waiting.
 * One block stays on each multiprocessor. Each of its warps has a ring of tiles in shared memory
 * that bulk copies keep full (by one more warp, which does nothing else), in the order in which the
 * warp will want them, across the ends of products and layers: while blocks wait for each other,
 * norms are taken or attention runs, the next weights are on their way already.
 *
 * A layer is five steps with a barrier over all blocks after each: q, k, v; attention; o; gate and
 * up; down. What does not depend on the step before is fetched before the barrier.
 *
 * Every block keeps the residual stream for itself and does the norms by itself. Rows of tiles of o
 * and down may be shared by blocks, at most 1 + extras of them: each writes its part, and who reads
 * them adds up, always in the same order.
 *
 * A product takes x in f16, each 16 columns times a power of two. The operand B of mma.m16n8k16 has
 * eight columns and there is one x: column b has x of block b of the tile alone, so that the sums
 * come out by blocks, and scales of weights and x need be applied only once for 16 columns. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/token_attention.cuh"

/* ---- the kernel ---- */

/* What does not change: layers, shares, what of those each warp has. */
__device__ static void begin_block(struct context &c)
{
    const uint32_t *from = (const uint32_t *)c.m.layers;
    int words = c.m.layer_count * (int)sizeof(struct layer) / 4;
    for (int i = threadIdx.x; i < words; i += (int)blockDim.x)
        ((uint32_t *)c.layers())[i] = from[i];
    if (threadIdx.x < STEPS * WARPS) {
        int step = threadIdx.x / WARPS, w = threadIdx.x % WARPS, cols = c.m.tile_cols[step];
        struct share own = c.m.shares[step * gridDim.x + blockIdx.x];
        struct warp_range r = range_of(own, w);
        struct rows rows = {(short)(r.begin / cols), (short)((r.end - 1) / cols)};
        if (r.begin == r.end)
            rows = {32767, -1};
        c.rows()[step * WARPS + w] = rows;
        if (w == 0) {
            c.own()[step] = own;
            c.span()[step] = {(short)(own.begin / cols), (short)((own.end - 1) / cols)};
            if (own.begin == own.end)
                c.span()[step] = {0, -1};
        }
    }
    if (threadIdx.x < 16)
        ((uint32_t *)c.zeros())[threadIdx.x] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * WARPS * c.m.stages; i += (int)blockDim.x)
        barrier_init(c.full() + i);
#if BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncthreads();
}

/* How many rows each block has in attention, as evenly as can be, and how many blocks have some.
 * This token's own row does not count; the last of those blocks has it too. */
__host__ __device__ static inline int rows_each(const struct model &m, int old, int *used)
{
    int splits = (old + SPLIT_ROWS - 1) / SPLIT_ROWS;
    splits = splits < 1 ? 1 : splits < m.splits ? splits : m.splits;
    int each = old > splits ? (old + splits - 1) / splits : 1;
    *used = old > each ? (old + each - 1) / each : 1;
    return each;
}

__device__ static struct part_of_attention share_rows(const struct model &m,
                                                      const struct step_args &a)
{
    struct part_of_attention p;
    int groups = m.NH / m.together, each = rows_each(m, a.last - a.first, &p.used);
    p.split = (int)blockIdx.x / groups;
    p.head = (int)blockIdx.x % groups * m.together;
    p.kv = p.head / (m.NH / m.NKV);
    p.begin = a.first + p.split * each;
    p.end = min(p.begin + each, a.last);
    return p;
}

__device__ static void begin_token(struct context &c, const struct step_args &a)
{
    if (threadIdx.x == THREADS - 1)
        *c.part_of() = share_rows(c.m, a);
    for (int i = threadIdx.x; i < c.m.C; i += THREADS)
        ((float *)c.x())[i] = load_float(c.m.embed, (int64_t)a.id * c.m.C + i, c.m.embed_type);
    if (threadIdx.x < HEAD / 2) {
        double sn, cs;
        sincos((double)((float)a.position * c.m.frequency[threadIdx.x]), &sn, &cs);
        c.turn()[threadIdx.x] = (float)cs * c.m.rope_scale;
        c.turn()[HEAD / 2 + threadIdx.x] = (float)sn * c.m.rope_scale;
    }
    sync_block();
}

/* The weights of the norms that come next, each thread those that it will want. */
__device__ static void fetch_norms(struct context &c, int layer, int step)
{
    if (step == DOWN && layer + 1 < c.m.layer_count && threadIdx.x < 2 * HEAD / 4)
        fetch_16(c.head_norm() + 4 * threadIdx.x,
                 c.m.head_norms + (layer + 1) * 2 * HEAD + 4 * threadIdx.x);
    if (step == DOWN || step == O)
        fetch_norm(c, 2 * layer + 1 + (step == DOWN));
}

template <enum nbi_dtype T, int G>
__global__ static void __launch_bounds__(THREADS + 32, 1)
    k_token(const __grid_constant__ struct model m, const __grid_constant__ struct step_args a)
{
    if (!BULK)
        return;
    struct context c = {m, 0, 0, a.epoch, 0, 0};
    c.warp = threadIdx.x / 32;
    c.lane = threadIdx.x % 32;
    begin_block(c);
    if (c.warp == WARPS) {
        fetch_all(c);
        return;
    }
    fetch_norms(c, -1, DOWN);
    begin_token(c, a);
#pragma unroll 1
    for (int layer = 0, step = QKV; step < STEPS;) {
        if (step == O || step == DOWN)
            put_halves(c, step);
        else
            put_normed(c, step, step == GATE_UP || layer > 0);
        sync_block();
        multiply(c, step, a.logits);
        sync_block();
        finish(c, step, layer, a.logits);
        if (step == LOGITS)
            break;
        fetch_norms(c, layer, step);
        struct row_feed<T> rows {
        };
        if (step == QKV)
            rows = fetch_row<T>(c, layer, c.part_of()->kv,
                                c.part_of()->begin + c.warp * 2 + c.lane / 16, c.part_of()->end);
        meet(c);
        if (step == QKV)
            attention<T, G>(c, layer, a, rows);
        step = step < DOWN ? step + 1 : QKV;
        layer += step == QKV;
        if (layer == m.layer_count)
            step = LOGITS;
    }
}

/* ---- the host's part ---- */

struct nbi_token {
    struct nbi_stream *s;
    struct model m;
    uint8_t *block;
    unsigned epoch, grid;
    size_t shared;
    const void *kernel;
};

typedef void (*token_kernel)(struct model, struct step_args);

template <enum nbi_dtype T> static const void *kernel_for(int together)
{
    return together == 4   ? (const void *)(token_kernel)k_token<T, 4>
           : together == 2 ? (const void *)(token_kernel)k_token<T, 2>
                           : (const void *)(token_kernel)k_token<T, 1>;
}

static bool is_tiles(const struct nbi_weight *w)
{
    return w->dtype == NBI_NVFP4 && w->layout == NBI_WEIGHT_TILES;
}

static bool fits(const struct nbi_token_model *m)
{
    bool ok = m->D == HEAD && m->C % 16 == 0 && m->F % 16 == 0 && is_tiles(&m->head) &&
              m->stores[0].dtype != NBI_F32;
    for (int64_t i = 0; i < m->layers; i++) {
        const struct nbi_layer_weights *l = &m->layer[i];
        const struct nbi_weight *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < 7; j++)
            ok = ok && is_tiles(all[j]);
    }
    return ok;
}

/* Cuts [0, units) of `cols` tiles each into whole units for each block. */
static void share_whole(struct share *s, int blocks, int64_t units, int64_t cols)
{
    for (int b = 0; b < blocks; b++)
        s[b] = (struct share){(int)(units * b / blocks * cols),
                              (int)(units * (b + 1) / blocks * cols), 0, 0};
}

/* Cuts tiles wherever it falls; blocks then share rows of tiles. */
static void share_cut(struct share *s, int blocks, int64_t tiles, int cols)
{
    for (int b = 0; b < blocks; b++)
        s[b] = (struct share){(int)(tiles * b / blocks), (int)(tiles * (b + 1) / blocks), 0, 0};
    for (int b = 0; b < blocks; b++) {
        int first = s[b].begin / cols * cols, behind = (s[b].end + cols - 1) / cols * cols;
        if (s[b].begin == s[b].end)
            continue;
        for (int o = b - 1; o >= 0 && s[o].end > first; o--)
            s[b].ordinal += s[o].end > s[o].begin;
        for (int o = b + 1; o < blocks && s[o].begin < behind; o++)
            s[b].after += s[o].end > s[o].begin;
    }
}

/* Who does what: whole rows of tiles where one block must have them. */
static void make_shares(struct share *s, const struct model *m, int blocks)
{
    int64_t qkv = (int64_t)(m->NH + 2 * m->NKV) * HEAD / 16, rows = m->C / 16;
    share_whole(s + QKV * blocks, blocks, qkv, m->tile_cols[QKV]);
    share_cut(s + O * blocks, blocks, rows * m->tile_cols[O], m->tile_cols[O]);
    share_whole(s + GATE_UP * blocks, blocks, m->F / 16, 2 * m->tile_cols[GATE_UP]);
    share_cut(s + DOWN * blocks, blocks, rows * m->tile_cols[DOWN], m->tile_cols[DOWN]);
    share_whole(s + LOGITS * blocks, blocks, ceil_div(m->V, 16), m->tile_cols[LOGITS]);
}

static int most_extras(const struct share *s, int blocks)
{
    int most = 0;
    for (int b = 0; b < blocks; b++) {
        most = s[O * blocks + b].ordinal > most ? s[O * blocks + b].ordinal : most;
        most = s[DOWN * blocks + b].ordinal > most ? s[DOWN * blocks + b].ordinal : most;
    }
    return most;
}

/* Of tiles that a block has in a product, but the head's. */
static int most_rows(const struct share *s, const struct model *m, int blocks)
{
    int most = 0;
    for (int i = 0; i < LOGITS * blocks; i++) {
        int cols = m->tile_cols[i / blocks];
        int rows = (s[i].end + cols - 1) / cols - s[i].begin / cols;
        most = rows > most ? rows : most;
    }
    return most;
}

/* What place copies to the device. */
struct tables {
    struct layer *layers;
    struct share *shares;
    float *norms, *head_norms;
};

static enum nb_status fill_layer(struct nbi_token *t, const struct tables *to, int64_t i,
                                 const struct nbi_token_model *m)
{
    struct cuda *cuda = t->s->cuda;
    const struct nbi_layer_weights *l = &m->layer[i];
    const struct nbi_weight *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    struct layer *out = &to->layers[i];
    for (int j = 0; j < MATRICES; j++) {
        out->tiles[j] = at<uint8_t>(all[j]->data);
        out->scale[j] = all[j]->tensor_scale;
    }
    out->k = at<void>(m->stores[i].k);
    out->v = at<void>(m->stores[i].v);
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->input_norm, to->norms + 2 * i * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->post_norm, to->norms + (2 * i + 1) * m->C));
    NBI_TRY(nbi_cuda_vector_read(cuda, &l->q_norm, to->head_norms + 2 * i * HEAD));
    return nbi_cuda_vector_read(cuda, &l->k_norm, to->head_norms + (2 * i + 1) * HEAD);
}

static void describe(struct model *m, const struct nbi_token_model *t, int sms)
{
    int shared = (int)(t->NH / t->NKV);
    m->together = shared % 4 == 0 ? 4 : shared % 2 == 0 ? 2 : 1;
    m->layer_count = (int)t->layers;
    m->C = (int)t->C;
    m->F = (int)t->F;
    m->NH = (int)t->NH;
    m->NKV = (int)t->NKV;
    m->V = (int)t->V;
    m->tile_cols[QKV] = m->tile_cols[GATE_UP] = m->tile_cols[LOGITS] = tiles_of(1, t->C).cols;
    m->tile_cols[O] = tiles_of(1, t->NH * HEAD).cols;
    m->tile_cols[DOWN] = tiles_of(1, t->F).cols;
    m->splits = sms / (m->NH / m->together);
    m->q_end = m->NH * HEAD / NBI_TILE_ROWS;
    m->k_end = m->q_end + m->NKV * HEAD / NBI_TILE_ROWS;
    m->head = at<uint8_t>(t->head.data);
    m->head_scale = t->head.tensor_scale;
    for (int i = 0; i < STEPS; i++)
        if (m->tile_cols[i] * NBI_TILE_COLS > m->longest)
            m->longest = m->tile_cols[i] * NBI_TILE_COLS;
    m->embed = at<void>(t->embed.data);
    m->embed_type = t->embed.dtype;
    m->store = t->stores[0].dtype;
    m->frequency = at<float>(t->frequency);
    m->rope_scale = t->rope_scale;
    m->eps = t->eps;
}

/* Tables and vectors in one block; the first four are filled from the host. */
static enum nb_status place(struct nbi_token *t, const struct tables *from)
{
    struct model *m = &t->m;
    int64_t groups = m->NH / m->together, q = (int64_t)(m->NH + 2 * m->NKV) * HEAD;
    const void *filled[4] = {from->layers, from->shares, from->norms, from->head_norms};
    const int64_t size[] = {(int64_t)sizeof(struct layer) * m->layer_count,
                            (int64_t)sizeof(struct share) * STEPS * t->grid,
                            (int64_t)(2 * m->layer_count + 1) * m->C * 4,
                            (int64_t)m->layer_count * 2 * HEAD * 4,
                            q * 4,
                            (int64_t)m->NH * HEAD * 2,
                            (int64_t)m->NH * HEAD / 16 * 4,
                            (int64_t)m->F * 2,
                            (int64_t)m->F / 16 * 4,
                            (int64_t)m->C * 4,
                            (int64_t)m->C * m->extras * 4,
                            groups * m->splits * m->together * (HEAD + 2) * 4,
                            256};
    const int count = sizeof size / sizeof *size;
    void **to[] = {(void **)&m->layers,     (void **)&m->shares, (void **)&m->norms,
                   (void **)&m->head_norms, (void **)&m->qkv,    (void **)&m->att,
                   (void **)&m->att_scale,  (void **)&m->act,    (void **)&m->act_scale,
                   (void **)&m->main,       (void **)&m->extra,  (void **)&m->parts,
                   (void **)&m->barrier};
    int64_t total = 0;
    struct nbi_ptr block;
    for (int i = 0; i < count; i++)
        total += ceil_div(size[i], 256) * 256;
    NBI_TRY(t->s->cuda->be.alloc(&t->s->cuda->be, "token", total, &block));
    t->block = at<uint8_t>(block);
    CU_TRY(cudaMemset(t->block, 0, (size_t)total));
    uint8_t *next = t->block;
    for (int i = 0; i < count; i++) {
        *to[i] = next;
        if (i < 4)
            CU_TRY(cudaMemcpy(next, filled[i], (size_t)size[i], cudaMemcpyHostToDevice));
        next += ceil_div(size[i], 256) * 256;
    }
    CU_TRY(cudaDeviceSynchronize()); /* other queues do not wait for those copies */
    return NB_OK;
}

/* As deep a ring as fits. */
static enum nb_status size_shared(struct nbi_token *t)
{
    struct model *m = &t->m;
    int most = 0, blocks = 0;
    struct cudaFuncAttributes code;
    /* Made from code for older cards, the kernel has no bulk copies and does nothing. */
    CU_TRY(cudaFuncGetAttributes(&code, t->kernel));
    if (code.ptxVersion < 90)
        return nbi_fail(NB_EUNSUPPORTED, "no code for this GPU");
    CU_TRY(
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, t->s->cuda->index));
    for (m->stages = 32; m->stages > 1 && places_of(*m).total > most;)
        m->stages--;
    if (m->stages < 2)
        return nbi_fail(NB_EUNSUPPORTED, "too little shared memory for one kernel a token");
    m->at = places_of(*m);
    t->shared = (size_t)m->at.total;
    /* Of the kernel, so of all its users. */
    CU_TRY(cudaFuncSetAttribute(t->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    CU_TRY(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, t->kernel, THREADS + 32, t->shared));
    return blocks > 0 ? NB_OK : nbi_fail(NB_EUNSUPPORTED, "no room for one kernel a token");
}

static enum nb_status fill_token(struct nbi_token *t, const struct nbi_token_model *m,
                                 const struct tables *tables)
{
    make_shares(tables->shares, &t->m, (int)t->grid);
    t->m.extras = most_extras(tables->shares, (int)t->grid);
    if (t->m.extras > EXTRAS_MAX || t->m.splits < 1 ||
        most_rows(tables->shares, &t->m, (int)t->grid) > WARPS * (SLOTS - 1) ||
        ceil_div(t->m.V, 16) > 32767)
        return nbi_fail(NB_EUNSUPPORTED, "shapes that one kernel a token does not suit");
    for (int64_t i = 0; i < m->layers; i++)
        NBI_TRY(fill_layer(t, tables, i, m));
    NBI_TRY(nbi_cuda_vector_read(t->s->cuda, &m->norm, tables->norms + 2 * m->layers * m->C));
    NBI_TRY(size_shared(t));
    return place(t, tables);
}

void nbi_cuda_token_free(struct nbi_token *t)
{
    if (!t)
        return;
    cudaFree(t->block);
    free(t);
}

enum nb_status nbi_cuda_token_new(struct nbi_stream *s, const struct nbi_token_model *m,
                                  struct nbi_token **out)
{
    *out = NULL;
    if (s->cuda->cc < 90 || !fits(m))
        return NB_EUNSUPPORTED;
    struct nbi_token *t = (struct nbi_token *)calloc(1, sizeof *t);
    const struct tables tables = {
        (struct layer *)calloc((size_t)m->layers, sizeof(struct layer)),
        (struct share *)calloc((size_t)s->cuda->sms * STEPS, sizeof(struct share)),
        (float *)calloc((size_t)((2 * m->layers + 1) * m->C), sizeof(float)),
        (float *)calloc((size_t)(m->layers * 2 * HEAD), sizeof(float))};
    bool there = t && tables.layers && tables.shares && tables.norms && tables.head_norms;
    enum nb_status rc = there ? NB_OK : nbi_fail_memory("token", sizeof *t);
    if (rc == NB_OK) {
        t->s = s;
        t->grid = (unsigned)s->cuda->sms;
        describe(&t->m, m, s->cuda->sms);
        t->kernel = t->m.store == NBI_F16    ? kernel_for<NBI_F16>(t->m.together)
                    : t->m.store == NBI_BF16 ? kernel_for<NBI_BF16>(t->m.together)
                                             : kernel_for<NBI_E4M3>(t->m.together);
        rc = fill_token(t, m, &tables);
    }
    free(tables.layers);
    free(tables.shares);
    free(tables.norms);
    free(tables.head_norms);
    if (rc == NB_OK)
        *out = t;
    else
        nbi_cuda_token_free(t);
    return rc;
}

enum nb_status nbi_cuda_token_run(struct nbi_token *t, const struct nbi_token_step *step)
{
    struct step_args a = {step->id, step->position,         step->slot, step->first, step->last,
                          t->epoch, at<float>(step->logits)};
    void *args[] = {&t->m, &a};
    int used;
    CU_HERE(t->s);
    rows_each(t->m, step->last - step->first, &used);
    CU_TRY(cudaLaunchCooperativeKernel(t->kernel, dim3(t->grid), dim3(THREADS + 32), args,
                                       t->shared, t->s->queue));
    /* Barriers of a layer; one more where blocks share heads. */
    t->epoch += t->grid * (unsigned)((used > 1 ? 6 : 5) * t->m.layer_count);
    return NB_OK;
}
