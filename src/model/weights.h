/* weights.h - the weights of a model on a backend, and their gradients. */
#pragma once

#include "backend/backend.h"
#include "model/params.h"

struct nbi_weights {
    struct nbi_backend *be;
    const struct nbi_config *config; /* borrowed */
#define X(field, ...) struct nbi_weight field;
    NBI_PARAMS_BEFORE(X)
    NBI_PARAMS_AFTER(X)
#undef X
    bool own_head; /* false: head is embed, as in a tied model without a head of its own */
    struct nbi_layer_weights *layers;
    struct nbi_ptr frequency; /* of RoPE, f32 [D/2] */
    float rope_scale;         /* YaRN's attention factor; 1 otherwise */
    int64_t bytes_per_token;  /* that decoding reads: all matrices but the embedding table */
};

/* Supplies weights. `load` makes one on the backend, or returns NB_ENOTFOUND. */
struct nbi_weight_provider {
    enum nb_status (*load)(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                           struct nbi_weight *out);
    void *ctx;
};

/* Weights of a file. The store must stay open until nbi_weights_load() returns. */
struct nbi_weight_provider nbi_weights_from_store(struct nbi_store *store);

/* Loads one of them. memory: as in nbi_weight_source. */
enum nb_status nbi_weight_load(struct nbi_store *store, struct nbi_backend *be,
                               const struct nbi_param *p, const struct nbi_weight_memory *memory,
                               struct nbi_weight *out);

/* Whether a file's embedding is only read by row, since it has a head of its own. */
bool nbi_weight_is_lookup(const struct nbi_store *store, const struct nbi_param *p);

/* Random weights: projections and head in NVFP4, the embedding in bf16, norms of 1. The seed must
 * stay valid until nbi_weights_load() returns. */
struct nbi_weight_provider nbi_weights_from_seed(uint64_t *seed);

/* progress (may be NULL) counts parameters. */
enum nb_status nbi_weights_load(struct nbi_weights *w, struct nbi_backend *be,
                                const struct nbi_config *config,
                                const struct nbi_weight_provider *from, nb_progress_fn progress,
                                void *progress_ctx);
void nbi_weights_release(struct nbi_weights *w);

/* Bytes that nbi_weights_load() allocates besides the weights. */
static inline int64_t nbi_frequency_bytes(const struct nbi_config *c)
{
    return c->head_dim / 2 * (int64_t)sizeof(float);
}

/* ---- gradients ---- */

/* Arrays that the backward pass adds to; none: no gradient is computed. They are f32, those of
 * matrices of layers bf16 with bf16. In a tied model head and embed are the same array. With
 * slice_rows these two have so many rows, and nbi_backward_slices() fills them again and again. */
#define X(field, ...) struct nbi_ptr field;
struct nbi_layer_grads {
    NBI_PARAMS_OF_LAYER(X)
};

struct nbi_grads {
    NBI_PARAMS_BEFORE(X)
    NBI_PARAMS_AFTER(X)
#undef X
    struct nbi_layer_grads *layers;
    int64_t first_layer; /* earlier layers are not trained; if it is not 0, nor is the embedding */
    bool fresh;          /* arrays are written instead: what they held is ignored */
    bool bf16;           /* only with fresh and activations in bf16 */
    int64_t slice_rows;  /* only with fresh and NB_LOSS_CE; a multiple of 32, or 0 */
};
