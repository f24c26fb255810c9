/* transformer.h - a dense Qwen3 as arithmetic: weights, activations, one forward pass.
 *
 * The same forward pass serves training, whole prompts, single tokens and evaluation. What differs
 * is where its pieces lie: the plan of the activations decides what is kept and what is written
 * over, and the key/value stores are a session's cache or simply part of the activations. The
 * backward pass (backward.c) is a list of operations too, in the opposite order. */
#pragma once

#include "backend/backend.h"
#include "model/acts.h"
#include "model/config.h"
#include "model/params.h"

/* ---- weights ---- */

struct nbi_weights {
    struct nbi_backend *be;
    const struct nbi_config *config; /* borrowed */
#define X(field, ...) struct nbi_weight field;
    NBI_PARAMS_BEFORE(X)
    NBI_PARAMS_AFTER(X)
#undef X
    bool own_head; /* else head is embed: a tied model without one of its own */
    struct nbi_layer_weights *layers;
    struct nbi_ptr frequency; /* of the rotation, f32 [D/2] */
    float rope_scale;
    int64_t bytes_per_token; /* read for one token: all matrices, without the embedding's table */
};

/* Where weights come from: hands one over to the backend, or says NB_ENOTFOUND. The embedding is a
 * lookup (nbi_weight_source) if there is a head as well. */
struct nbi_weight_provider {
    enum nb_status (*load)(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                           struct nbi_weight *out);
    void *ctx;
};

/* The store is read while weights are loaded, and not kept. */
struct nbi_weight_provider nbi_weights_from_store(struct nbi_store *store);

/* Random weights: NVFP4 projections and head, a bf16 embedding, norms of 1. ctx is the seed. */
struct nbi_weight_provider nbi_weights_from_seed(uint64_t *seed);

/* progress counts parameters. */
enum nb_status nbi_weights_load(struct nbi_weights *w, struct nbi_backend *be,
                                const struct nbi_config *config,
                                const struct nbi_weight_provider *from, nb_progress_fn progress,
                                void *progress_ctx);
void nbi_weights_release(struct nbi_weights *w);

/* ---- the pass ---- */

/* One pass over N tokens, which may belong to several sequences. All arrays are host memory. */
struct nbi_pass {
    int64_t N;
    const int32_t *ids;
    const int32_t *positions;
    const int32_t *kv_rows;        /* where each token's key and value go in the stores */
    const int32_t *first, *last;   /* the rows of the stores that each token sees */
    const int32_t *pages, *tables; /* as nbi_op_attention has them; NULL: first and last are it */
    int64_t page_count;            /* in pages */
    int64_t decode_rows;           /* so many tokens, the first, are apart (nbi_op_attention) */
    int64_t M;                     /* rows of which logits are wanted */
    const int32_t *rows;           /* which */
    const struct nbi_kv_view *kv;  /* one per layer */
    bool exact;
    bool batch_invariant; /* products and attention give a token the same bits in any company */
    bool one_row_per_sequence; /* each token is the only one of its sequence (nbi_op_attention) */
    /* Called after each layer with the residual stream still on the device; NULL: not. */
    enum nb_status (*after_layer)(void *ctx, int64_t layer, struct nbi_ptr x);
    void *ctx;
};

/* Leaves logits [M, V] in a->logits, queued on s. Waits for nothing and allocates nothing, but for
 * what nbi_backend.graph_run keeps. */
enum nb_status nbi_execute(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                           const struct nbi_pass *pass);

/* After a forward pass (with M = 0) over the same acts: logits of further rows, pass->M of them. */
enum nb_status nbi_execute_head(const struct nbi_weights *w, struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *pass);

/* Whether nbi_execute_run_ahead may come next behind a pass that has been queued. */
bool nbi_execute_can_run_ahead(const struct nbi_acts *a, const struct nbi_pass *pass);

/* The best of the one row of logits that the last pass left, to the host, and a pass over the one
 * that f says as the next token: where it goes is what `pass` says, its id is not. The pass may be
 * at work on return. f->top is filled in. */
enum nb_status nbi_execute_run_ahead(const struct nbi_weights *w, const struct nbi_acts *a,
                                     struct nbi_stream *s, const struct nbi_pass *pass,
                                     struct nbi_run_ahead *f);

/* The J best of the first M <= a->topk_rows rows of logits, as nbi_op_topk gives them, one behind
 * the other in a->top: int32 odd [M], int32 ids [M, J], f32 values [M, J]. */
enum nb_status nbi_execute_topk(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, int64_t M, int64_t J);

static inline int64_t nbi_topk_bytes(int64_t M, int64_t J)
{
    return M * (1 + 2 * J) * (int64_t)sizeof(int32_t);
}

/* ---- training ---- */

/* Gradients, f32, added to by the backward pass; none: not wanted. In a tied model that of the head
 * is that of the embedding. */
#define X(field, ...) struct nbi_ptr field;
struct nbi_layer_grads {
    NBI_PARAMS_OF_LAYER(X)
};

struct nbi_grads {
    NBI_PARAMS_BEFORE(X)
    NBI_PARAMS_AFTER(X)
#undef X
    struct nbi_layer_grads *layers;
    int64_t first_layer; /* layers before it, and the embedding, have none */
};

/* Scalar: the mean absolute difference of what the final norm gives and the embedding of the id to
 * be predicted, which counts as a constant. The head has no part in it. */
enum nbi_loss_kind { NBI_LOSS_CE, NBI_LOSS_SCALAR };

#define NBI_REF_IDS 64 /* ids of the base model that are known for a row, at most */

/* The rows of a pass that are to predict something. All arrays are host memory. */
struct nbi_labels {
    enum nbi_loss_kind kind;
    int64_t count;
    const int32_t *rows;    /* in order, no row twice */
    const int32_t *targets; /* the id each is to predict */
    float scale;            /* of the gradient: 1 / labels of the whole batch */
    int64_t ref_k;          /* with cross entropy: what a base model thought; 0: nothing */
    const int32_t
        *ref_ids;       /* [count, ref_k], no id twice in a row; the first negative: none here */
    const float *ref_p; /* [count, ref_k] */
    float kl_scale;     /* of the gradient of KL(base || model) */
    float *scratch;     /* as many as the acts have rows of logits */
    double loss, kl;    /* out: sums over the rows, computed in order */
};

/* After a forward pass (with M = 0) over the same acts: the losses, M rows of logits at a time.
 * With grads also their gradients by head and final norm, and of the residual stream in a->d.x.
 * Waits for the results. */
enum nb_status nbi_loss(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                        const struct nbi_pass *pass, struct nbi_labels *labels,
                        const struct nbi_grads *grads);

/* The rest of the way: through the layers from the last to grads->first_layer, and to the
 * embedding. after_layer, if there is one, is called as soon as a layer's gradients are complete.
 */
struct nbi_backward_hook {
    enum nb_status (*after_layer)(void *ctx, int64_t layer);
    void *ctx;
};

enum nb_status nbi_backward(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                            const struct nbi_pass *pass, const struct nbi_grads *grads,
                            const struct nbi_backward_hook *hook);

/* For nbi_backward: what a layer keeps, computed again from what went into it. */
enum nb_status nbi_forward_layer(const struct nbi_weights *w, const struct nbi_acts *a,
                                 struct nbi_stream *s, const struct nbi_pass *pass, int64_t layer);
