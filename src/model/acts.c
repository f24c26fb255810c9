/* acts.c - where activations lie: one block, handed out in pieces.
 *
 * Without a backward pass nothing outlives its layer, so all layers share their pieces, and pieces
 * whose lives do not overlap share memory: the attention's (norm1, q, k, v, att) and the MLP's
 * (norm2, gate, up). */
#include <string.h>

#include "model/qwen3.h"

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

/* Sets all pieces relative to base; the bytes they need. layer may be NULL. */
static int64_t lay_out(struct nbi_acts *a, struct nbi_layer_acts *layer, const struct nbi_config *c,
                       struct nbi_ptr base)
{
    struct cursor at = {.base = base};
    int64_t N = a->N, M = a->M, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    struct nbi_ptr *indices[] = {&a->ids, &a->positions, &a->slots, &a->first, &a->last};
    for (int i = 0; i < 5; i++)
        *indices[i] = take(&at, N, sizeof(int32_t));
    a->rows = take(&at, M, sizeof(int32_t));
    a->cos = floats(&at, N, c->head_dim / 2);
    a->sin = floats(&at, N, c->head_dim / 2);
    a->x = floats(&at, N, c->hidden_size);
    a->final = floats(&at, M, c->hidden_size);
    a->logits = floats(&at, M, c->vocab_size);
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

int64_t nbi_acts_bytes(const struct nbi_config *c, int64_t N, int64_t M)
{
    struct nbi_acts a = {.N = N, .M = M};
    struct nbi_layer_acts layer = {0};
    return lay_out(&a, &layer, c, (struct nbi_ptr){0});
}

enum nb_status nbi_acts_init(struct nbi_acts *a, struct nbi_backend *be, const struct nbi_config *c,
                             int64_t N, int64_t M)
{
    struct nbi_layer_acts layer = {0};
    *a = (struct nbi_acts){.be = be, .N = N, .M = M, .layer_count = c->layers};
    a->bytes = nbi_acts_bytes(c, N, M);
    a->layers = calloc((size_t)c->layers, sizeof *a->layers);
    if (!a->layers)
        return nbi_fail_memory("activations", (size_t)c->layers * sizeof *a->layers);
    enum nb_status rc = be->alloc(be, "activations", a->bytes, &a->block);
    if (rc != NB_OK) {
        nbi_acts_release(a);
        return rc;
    }
    lay_out(a, &layer, c, a->block);
    for (int64_t i = 0; i < c->layers; i++)
        a->layers[i] = layer;
    return NB_OK;
}

void nbi_acts_release(struct nbi_acts *a)
{
    if (a->be)
        a->be->free(a->be, a->block);
    free(a->layers);
    *a = (struct nbi_acts){0};
}
