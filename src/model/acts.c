/* acts.c - where activations lie: one block, handed out in pieces.
 *
 * Without a backward pass nothing outlives its layer, so all layers share their pieces, and pieces
 * whose lives do not overlap share memory: the attention's (norm1, q, k, v, att) and the MLP's
 * (norm2, gate, up). For training each layer has its own, or all but what goes into it is computed
 * again in one set for all; layers that are not trained share theirs. */
#include <string.h>

#include "backend/decode.h"
#include "model/transformer.h"

/* Hands out pieces of a block that may not exist yet. */
struct cursor {
    struct nbi_ptr base;
    int64_t used, peak;
};

static struct nbi_ptr take(struct cursor *c, int64_t count, int64_t size)
{
    struct nbi_ptr p = nbi_ptr_add(c->base, c->used);
    c->used += (count * size + 63) / 64 * 64;
    if (c->used > c->peak)
        c->peak = c->used;
    return p;
}

static struct nbi_ptr floats(struct cursor *c, int64_t rows, int64_t cols)
{
    return take(c, rows * cols, sizeof(float));
}

/* Numbers that a pass says of its tokens, of the rows of logits, and of pages. */
static int64_t index_count(const struct nbi_acts *a)
{
    return (a->page_count > 0 ? 6 : 5) * a->N + a->M + a->page_count;
}

/* What every pass needs. */
static void lay_out_common(struct nbi_acts *a, const struct nbi_config *c, struct cursor *at)
{
    int64_t N = a->N, M = a->M;
    a->indices = take(at, index_count(a), sizeof(int32_t));
    a->cos = floats(at, N, c->head_dim / 2);
    a->sin = floats(at, N, c->head_dim / 2);
    a->x = floats(at, N, c->hidden_size);
    a->final = floats(at, M, c->hidden_size);
    a->logits = floats(at, M, c->vocab_size);
    a->topk = take(at, nbi_topk_bytes(a->topk_rows, NBI_TOPK_MAX), 1);
    a->topk_scratch = take(at, a->topk_rows * nbi_topk_scratch_bytes(c->vocab_size), 1);
}

/* Sets all pieces relative to base; the bytes they need. layer may be NULL. */
static int64_t lay_out(struct nbi_acts *a, struct nbi_layer_acts *layer, const struct nbi_config *c,
                       struct nbi_ptr base)
{
    struct cursor at = {.base = base};
    int64_t N = a->N, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    lay_out_common(a, c, &at);
    int64_t shared = at.used;
    layer->norm1 = floats(&at, N, c->hidden_size);
    layer->q = layer->q_rot = floats(&at, N, q);
    layer->k = floats(&at, N, kv);
    layer->v = floats(&at, N, kv);
    layer->att = floats(&at, N, q);
    at.used = shared;
    layer->norm2 = floats(&at, N, c->hidden_size);
    layer->gate = layer->act = floats(&at, N, c->intermediate_size);
    layer->up = floats(&at, N, c->intermediate_size);
    return at.peak;
}

/* All that the backward pass of one layer wants, but for `in`. */
static void lay_out_layer(const struct nbi_acts *a, struct nbi_layer_acts *l,
                          const struct nbi_config *c, struct cursor *at)
{
    int64_t N = a->N, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    l->norm1 = floats(at, N, c->hidden_size);
    l->rstd1 = floats(at, N, 1);
    l->q = floats(at, N, q);
    l->k = floats(at, N, kv);
    l->v = floats(at, N, kv);
    l->q_rot = floats(at, N, q);
    l->rstd_q = floats(at, N, c->heads);
    l->rstd_k = floats(at, N, c->kv_heads);
    l->kv = (struct nbi_kv_view){floats(at, N, kv), floats(at, N, kv), NBI_F32};
    l->att = floats(at, N, q);
    l->lse = floats(at, N, c->heads);
    l->mid = floats(at, N, c->hidden_size);
    l->norm2 = floats(at, N, c->hidden_size);
    l->rstd2 = floats(at, N, 1);
    l->gate = floats(at, N, c->intermediate_size);
    l->up = floats(at, N, c->intermediate_size);
    l->act = floats(at, N, c->intermediate_size);
}

static void lay_out_back(struct nbi_acts *a, const struct nbi_config *c, struct cursor *at)
{
    int64_t N = a->N, M = a->M, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    a->d.x = floats(at, N, c->hidden_size);
    a->d.norm = floats(at, N, c->hidden_size);
    a->d.final = floats(at, M, c->hidden_size);
    a->d.rstd = floats(at, M, 1);
    a->d.loss = floats(at, M, 1);
    a->d.targets = take(at, M, sizeof(int32_t));
    int64_t shared = at->used; /* the loss, attention and MLP have their turns */
    a->d.target_embed = floats(at, M, c->hidden_size);
    a->d.ones = floats(at, M, 1);
    at->used = shared;
    a->d.kl = floats(at, M, 1);
    a->d.ref_ids = take(at, M * NBI_REF_IDS, sizeof(int32_t));
    a->d.ref_p = floats(at, M, NBI_REF_IDS);
    at->used = shared;
    a->d.att = floats(at, N, q);
    a->d.q = floats(at, N, q);
    a->d.k = floats(at, N, kv);
    a->d.v = floats(at, N, kv);
    at->used = shared;
    a->d.act = floats(at, N, c->intermediate_size);
    at->used = at->peak;
}

/* layers may be NULL: sizes alone. */
static int64_t lay_out_training(struct nbi_acts *a, const struct nbi_config *c,
                                struct nbi_layer_acts *layers, struct nbi_ptr base)
{
    struct cursor at = {.base = base};
    struct nbi_layer_acts one = {0};
    lay_out_common(a, c, &at);
    lay_out_back(a, c, &at);
    if (a->recompute)
        lay_out_layer(a, &one, c, &at);
    for (int64_t i = 0; i < c->layers; i++) {
        bool own = i == 0 || i >= a->first_layer;
        if (own)
            one.in = floats(&at, a->N, c->hidden_size);
        if (own && !a->recompute)
            lay_out_layer(a, &one, c, &at);
        if (layers)
            layers[i] = one;
    }
    return at.peak;
}

static struct nbi_acts acts_for(const struct nbi_acts_opts *o)
{
    return (struct nbi_acts){.N = o->N,
                             .M = o->M,
                             .page_count = o->page_count,
                             .topk_rows = o->topk_rows > 0 ? o->topk_rows : 1,
                             .recompute = o->recompute,
                             .first_layer = o->first_layer};
}

int64_t nbi_acts_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = acts_for(o);
    struct nbi_layer_acts layer = {0};
    return lay_out(&a, &layer, c, (struct nbi_ptr){0});
}

int64_t nbi_acts_host_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = acts_for(o);
    return c->layers * (int64_t)sizeof *a.layers + index_count(&a) * (int64_t)sizeof *a.packed;
}

int64_t nbi_acts_training_bytes(const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    struct nbi_acts a = acts_for(o);
    return lay_out_training(&a, c, NULL, (struct nbi_ptr){0});
}

static enum nb_status allocate(struct nbi_acts *a, const struct nbi_config *c)
{
    size_t indices = (size_t)index_count(a) * sizeof *a->packed;
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
    *a = acts_for(o);
    a->be = be;
    a->bytes = nbi_acts_bytes(c, o);
    NBI_TRY(allocate(a, c));
    lay_out(a, &layer, c, a->block);
    for (int64_t i = 0; i < c->layers; i++)
        a->layers[i] = layer;
    return NB_OK;
}

enum nb_status nbi_acts_init_training(struct nbi_acts *a, struct nbi_backend *be,
                                      const struct nbi_config *c, const struct nbi_acts_opts *o)
{
    *a = acts_for(o);
    a->be = be;
    a->training = true;
    a->bytes = nbi_acts_training_bytes(c, o);
    NBI_TRY(allocate(a, c));
    lay_out_training(a, c, a->layers, a->block);
    return NB_OK;
}

enum nb_status nbi_acts_use_megakernel(struct nbi_acts *a, const struct nbi_weights *w,
                                       struct nbi_stream *s, const struct nbi_kv_view *stores)
{
    const struct nbi_config *c = w->config;
    const struct nbi_megakernel_model m = {.layers = c->layers,
                                           .C = c->hidden_size,
                                           .F = c->intermediate_size,
                                           .NH = c->heads,
                                           .NKV = c->kv_heads,
                                           .D = c->head_dim,
                                           .V = c->vocab_size,
                                           .layer = w->layers,
                                           .kv = stores,
                                           .embed = w->embed,
                                           .norm = w->norm,
                                           .head = w->head,
                                           .frequency = w->frequency,
                                           .rope_scale = w->rope_scale,
                                           .eps = (float)c->rms_eps};
    enum nb_status rc =
        a->be->megakernel_new ? a->be->megakernel_new(s, &m, &a->megakernel) : NB_OK;
    return rc == NB_EUNSUPPORTED ? NB_OK : rc;
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
