/* acts.c - plans where activations lie in one block, and allocates it.
 *
 * Inference keeps nothing beyond its layer, so all layers share one set, and attention (norm1, q,
 * k, v, att) and MLP (norm2, gate, up) share memory, since they are never live together. In
 * training every layer has a set of its own. With recompute only `in` is its own, and all layers
 * share one set; layers that are not trained share everything. */
#include <string.h>

#include "backend/ops.h"
#include "backend/ops_train.h"
#include "model/transformer.h"

/* Allocates from a block front to back. base may be none: then only sizes count. */
struct cursor {
    struct nbi_ptr base;
    enum nbi_dtype dtype; /* of activations */
    int64_t used, peak;
};

static struct nbi_ptr alloc_array(struct cursor *c, int64_t count, int64_t size)
{
    struct nbi_ptr p = nbi_ptr_add(c->base, c->used);
    c->used += (count * size + 63) / 64 * 64;
    if (c->used > c->peak)
        c->peak = c->used;
    return p;
}

static struct nbi_ptr alloc_f32(struct cursor *c, int64_t rows, int64_t cols)
{
    return alloc_array(c, rows * cols, sizeof(float));
}

/* Activations, in their type. */
static struct nbi_ptr alloc_acts(struct cursor *c, int64_t rows, int64_t cols)
{
    return alloc_array(c, rows * cols, nbi_dtypes[c->dtype].bytes);
}

/* Elements of a->indices: arrays over tokens, rows of logits and pages. Training has more arrays
 * over tokens, and rows of logits for all of them. */
static int64_t index_count(const struct nbi_acts *a, bool training)
{
    if (training)
        return 8 * a->N;
    return (a->page_count > 0 ? 6 : 5) * a->N + a->M + a->page_count;
}

static void plan_common(struct nbi_acts *a, const struct nbi_config *c, struct cursor *at,
                        bool training)
{
    int64_t N = a->N, M = a->M;
    a->indices = alloc_array(at, index_count(a, training), sizeof(int32_t));
    a->cos = alloc_f32(at, N, c->head_dim / 2);
    a->sin = alloc_f32(at, N, c->head_dim / 2);
    a->x = alloc_acts(at, N, c->hidden_size);
    a->final = alloc_acts(at, M, c->hidden_size);
    a->logits = alloc_acts(at, M, c->vocab_size);
    a->topk = alloc_array(at, nbi_topk_bytes(a->topk_rows, NBI_TOPK_MAX), 1);
    a->topk_scratch = alloc_array(at, a->topk_rows * nbi_topk_scratch_bytes(c->vocab_size), 1);
}

/* Sets all pointers relative to base, those of any layer in *layer. Returns the bytes needed. */
static int64_t plan_inference(struct nbi_acts *a, struct nbi_layer_acts *layer,
                              const struct nbi_config *c, struct nbi_ptr base)
{
    struct cursor at = {.base = base, .dtype = a->dtype};
    int64_t N = a->N, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    plan_common(a, c, &at, false);
    int64_t shared = at.used;
    layer->norm1 = alloc_acts(&at, N, c->hidden_size);
    layer->q = layer->q_rot = alloc_acts(&at, N, q);
    layer->k = alloc_acts(&at, N, kv);
    layer->v = alloc_acts(&at, N, kv);
    layer->att = alloc_acts(&at, N, q);
    at.used = shared;
    layer->norm2 = alloc_acts(&at, N, c->hidden_size);
    layer->gate = layer->act = alloc_acts(&at, N, c->intermediate_size);
    layer->up = alloc_acts(&at, N, c->intermediate_size);
    return at.peak;
}

/* q, k and v as columns of the same rows, `ld` elements long. */
static void alloc_qkv(struct cursor *at, const struct nbi_config *c, int64_t N,
                      struct nbi_ptr *const out[3], int64_t *ld)
{
    const int64_t cols[3] = {c->heads * c->head_dim, c->kv_heads * c->head_dim,
                             c->kv_heads * c->head_dim};
    *ld = cols[0] + cols[1] + cols[2];
    struct nbi_ptr p = alloc_acts(at, N, *ld);
    for (int i = 0; i < 3; i++) {
        *out[i] = p;
        p = nbi_ptr_add(p, cols[i] * nbi_dtypes[at->dtype].bytes);
    }
}

/* What the backward pass of a layer reads, except `in`. */
static void plan_layer(const struct nbi_acts *a, struct nbi_layer_acts *l,
                       const struct nbi_config *c, struct cursor *at)
{
    int64_t N = a->N, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    l->norm1 = alloc_acts(at, N, c->hidden_size);
    l->rstd1 = alloc_f32(at, N, 1);
    alloc_qkv(at, c, N, (struct nbi_ptr *const[3]){&l->q, &l->k, &l->v}, &l->ld_qkv);
    l->q_rot = alloc_acts(at, N, q);
    l->rstd_q = alloc_f32(at, N, c->heads);
    l->rstd_k = alloc_f32(at, N, c->kv_heads);
    l->kv = (struct nbi_kv_view){alloc_acts(at, N, kv), alloc_acts(at, N, kv), a->dtype};
    l->att = alloc_acts(at, N, q);
    l->lse = alloc_f32(at, N, c->heads);
    l->mid = alloc_acts(at, N, c->hidden_size);
    l->norm2 = alloc_acts(at, N, c->hidden_size);
    l->rstd2 = alloc_f32(at, N, 1);
    l->ld_gate = 2 * c->intermediate_size;
    l->gate = alloc_acts(at, N, l->ld_gate);
    l->up = nbi_ptr_add(l->gate, nbi_acts_size(a, c->intermediate_size));
    l->act = alloc_acts(at, N, c->intermediate_size);
}

static void plan_reference(struct nbi_backward_acts *d, int64_t N, struct cursor *at)
{
    d->ref_ids = alloc_array(at, N * NBI_REF_IDS, sizeof(int32_t));
    d->ref_p = alloc_f32(at, N, NBI_REF_IDS);
}

static void plan_backward(struct nbi_acts *a, const struct nbi_config *c, struct cursor *at)
{
    int64_t N = a->N, M = a->M, ld;
    struct nbi_backward_acts *d = &a->d;
    d->x = alloc_acts(at, N, c->hidden_size);
    d->norm = alloc_acts(at, N, c->hidden_size);
    d->final = alloc_acts(at, M, c->hidden_size);
    d->rstd = alloc_f32(at, M, 1);
    d->loss = alloc_f32(at, N, 1);
    d->kl = alloc_f32(at, N, 1);
    d->targets = alloc_array(at, N, sizeof(int32_t));
    if (a->slices) {
        d->kept = alloc_array(at, N, sizeof(struct nbi_xent_kept));
        plan_reference(d, N, at);
    }
    int64_t shared = at->used; /* each loss, attention and MLP use the same memory in turn */
    d->target_embed = alloc_acts(at, M, c->hidden_size);
    d->ones = alloc_f32(at, M, 1);
    at->used = shared;
    if (!a->slices)
        plan_reference(d, N, at);
    at->used = shared;
    d->all_final = a->slices ? alloc_acts(at, N, c->hidden_size) : (struct nbi_ptr){0};
    at->used = shared;
    d->att = alloc_acts(at, N, c->heads * c->head_dim);
    alloc_qkv(at, c, N, (struct nbi_ptr *const[3]){&d->q, &d->k, &d->v}, &ld);
    at->used = shared;
    d->act = alloc_acts(at, N, c->intermediate_size);
    at->used = at->peak;
}

/* layers may be NULL, to get only the size. */
static int64_t plan_training(struct nbi_acts *a, const struct nbi_config *c,
                             struct nbi_layer_acts *layers, struct nbi_ptr base)
{
    struct cursor at = {.base = base, .dtype = a->dtype};
    struct nbi_layer_acts one = {0};
    plan_common(a, c, &at, true);
    plan_backward(a, c, &at);
    if (a->recompute)
        plan_layer(a, &one, c, &at);
    for (int64_t i = 0; i < c->layers; i++) {
        bool own = i == 0 || i >= a->first_layer;
        if (own)
            one.in = alloc_acts(&at, a->N, c->hidden_size);
        if (own && !a->recompute)
            plan_layer(a, &one, c, &at);
        if (layers)
            layers[i] = one;
    }
    return at.peak;
}

static struct nbi_acts with_opts(const struct nbi_acts_opts *o)
{
    return (struct nbi_acts){.N = o->N,
                             .M = o->M,
                             .page_count = o->page_count,
                             .topk_rows = o->topk_rows > 0 ? o->topk_rows : 1,
                             .dtype = o->dtype == NBI_BF16 ? NBI_BF16 : NBI_F32,
                             .recompute = o->recompute,
                             .slices = o->slices,
                             .first_layer = o->first_layer};
}

int64_t nbi_acts_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = with_opts(o);
    struct nbi_layer_acts layer = {0};
    return plan_inference(&a, &layer, c, (struct nbi_ptr){0});
}

int64_t nbi_acts_host_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = with_opts(o);
    return c->layers * (int64_t)sizeof *a.layers +
           index_count(&a, false) * (int64_t)sizeof *a.packed;
}

int64_t nbi_acts_training_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = with_opts(o);
    return plan_training(&a, c, NULL, (struct nbi_ptr){0});
}

static enum nb_status allocate(struct nbi_acts *a, const struct nbi_config *c, bool training)
{
    size_t indices = (size_t)index_count(a, training) * sizeof *a->packed;
    a->layer_count = c->layers;
    a->layers = calloc((size_t)c->layers, sizeof *a->layers);
    a->packed = malloc(indices);
    enum nb_status rc =
        a->layers && a->packed
            ? a->be->alloc(a->be, "activations", a->bytes, &a->block)
            : nbi_fail_memory("activations", (size_t)c->layers * sizeof *a->layers + indices);
    if (rc != NB_OK)
        nbi_acts_release(a);
    return rc;
}

enum nb_status nbi_acts_init(struct nbi_acts *a, struct nbi_backend *be, const struct nbi_config *c,
                             const struct nbi_acts_opts *o)
{
    struct nbi_layer_acts layer = {0};
    *a = with_opts(o);
    a->be = be;
    a->bytes = nbi_acts_bytes(c, o);
    NBI_TRY(allocate(a, c, false));
    plan_inference(a, &layer, c, a->block);
    for (int64_t i = 0; i < c->layers; i++)
        a->layers[i] = layer;
    return NB_OK;
}

enum nb_status nbi_acts_init_training(struct nbi_acts *a, struct nbi_backend *be,
                                      const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    *a = with_opts(o);
    a->be = be;
    a->training = true;
    a->bytes = nbi_acts_training_bytes(c, o);
    NBI_TRY(allocate(a, c, true));
    plan_training(a, c, a->layers, a->block);
    return NB_OK;
}

void nbi_acts_release(struct nbi_acts *a)
{
    if (a->megakernel)
        a->be->megakernel_free(a->megakernel);
    if (a->be)
        a->be->free(a->be, a->block);
    free(a->layers);
    free(a->packed);
    *a = (struct nbi_acts){0};
}

struct nbi_stream_limits nbi_stream_limits_for(const struct nbi_config *c, int64_t N, bool training)
{
    int64_t q = c->heads * c->head_dim, K = c->hidden_size;
    K = c->intermediate_size > K ? c->intermediate_size : K;
    return (struct nbi_stream_limits){
        .N = N, .K = q > K ? q : K, .D = c->head_dim, .heads = c->heads, .training = training};
}

int64_t nbi_logits_rows(int64_t vocab, int64_t min, int64_t max)
{
    int64_t rows = ((int64_t)32 << 20) / (vocab * (int64_t)sizeof(float));
    rows = rows < min ? min : rows;
    return rows < max ? rows : max;
}
