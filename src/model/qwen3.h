/* qwen3.h - a dense Qwen3 as arithmetic: weights, activations, one forward pass.
 *
 * The same forward pass serves training, whole prompts, single tokens and evaluation. What differs
 * is where its pieces lie: the plan of the activations decides what is kept and what is written
 * over, and the key/value stores are a session's cache or simply part of the activations. */
#pragma once

#include "backend/backend.h"
#include "model/config.h"

/* ---- weights ---- */

struct nbi_layer_weights {
    struct nbi_weight input_norm, post_norm, q_norm, k_norm;
    struct nbi_weight q, k, v, o, gate, up, down;
};

struct nbi_weights {
    struct nbi_backend *be;
    const struct nbi_config *config;     /* borrowed */
    struct nbi_weight embed, norm, head; /* head is embed in a tied model without one of its own */
    bool own_head;
    struct nbi_layer_weights *layers;
    struct nbi_ptr frequency; /* of the rotation, f32 [D/2] */
    float rope_scale;
    int64_t bytes_per_token; /* read for one token: all matrices, without the embedding's table */
};

/* Where weights come from: hands one over to the backend, or says NB_ENOTFOUND. */
struct nbi_weight_provider {
    enum nb_status (*take)(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                           struct nbi_weight *out);
    void *ctx;
};

/* Floats stay where they are mapped, if the backend can use them there; so the store must outlive
 * the weights. */
struct nbi_weight_provider nbi_weights_of_store(struct nbi_store *store);

/* Random weights: NVFP4 projections and head, a bf16 embedding, norms of 1. ctx is the seed. */
struct nbi_weight_provider nbi_weights_at_random(uint64_t *seed);

/* progress counts parameters. */
enum nb_status nbi_weights_load(struct nbi_weights *w, struct nbi_backend *be,
                                const struct nbi_config *config,
                                const struct nbi_weight_provider *from, nb_progress_fn progress,
                                void *progress_ctx);
void nbi_weights_release(struct nbi_weights *w);

/* ---- activations ---- */

struct nbi_layer_acts {
    struct nbi_ptr norm1, q, k, v, q_rot, att, norm2, gate, up, act; /* [N, ...] */
    struct nbi_ptr rstd1, rstd2, rstd_q, rstd_k, lse;                /* training only */
    struct nbi_kv_store kv; /* training: this layer's own rows */
};

struct nbi_acts {
    struct nbi_backend *be;
    int64_t N; /* rows at most */
    int64_t M; /* rows of logits at most */
    struct nbi_ptr block;
    int64_t bytes;
    struct nbi_ptr ids, positions, slots, first, last, rows; /* int32 */
    struct nbi_ptr cos, sin;
    struct nbi_ptr x;              /* [N, C] residual stream */
    struct nbi_ptr final;          /* [M, C] */
    struct nbi_ptr logits;         /* [M, V] */
    struct nbi_layer_acts *layers; /* of inference, all the same */
    int64_t layer_count;
};

/* Room for passes of up to N rows and M rows of logits without keeping anything per layer. */
enum nb_status nbi_acts_init(struct nbi_acts *a, struct nbi_backend *be, const struct nbi_config *c,
                             int64_t N, int64_t M);
int64_t nbi_acts_bytes(const struct nbi_config *c, int64_t N, int64_t M);
void nbi_acts_release(struct nbi_acts *a);

/* ---- the pass ---- */

/* One pass over N tokens, which may belong to several sequences. All arrays are host memory. */
struct nbi_pass {
    int64_t N;
    const int32_t *ids;
    const int32_t *positions;
    const int32_t *slots;              /* where each token's key and value go in the stores */
    const int32_t *first, *last;       /* the rows of the stores that each token sees */
    int64_t M;                         /* rows of which logits are wanted */
    const int32_t *rows;               /* which */
    const struct nbi_kv_store *stores; /* one per layer */
    bool exact;
    /* Called after each layer with the residual stream still on the device; NULL: not. */
    enum nb_status (*after_layer)(void *ctx, int64_t layer, struct nbi_ptr x);
    void *ctx;
};

/* Leaves logits [M, V] in a->logits, queued on s. */
enum nb_status nbi_forward(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                           const struct nbi_pass *pass);
