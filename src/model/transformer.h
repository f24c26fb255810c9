/* transformer.h - a dense Qwen3 as lists of operations: forward pass, losses, backward pass.
 *
 * One forward pass serves training, prompts, decoding and evaluation. It is a list of tokens, each
 * with its position, the row of the KV cache that it fills and the rows that it attends to; the
 * activations (acts.h) decide what is kept for a backward pass. Inference and training run passes
 * through execute.h. */
#pragma once

#include "backend/backend.h"
#include "model/acts.h"
#include "model/config.h"
#include "model/weights.h"

/* ---- forward ---- */

/* A pass over N tokens of one or more sequences. All arrays are host memory. */
struct nbi_pass {
    int64_t N;
    const int32_t *ids;            /* [N] */
    const int32_t *positions;      /* [N] */
    const int32_t *kv_rows;        /* [N] the row of the KV cache that each token fills */
    const int32_t *first, *last;   /* [N] the rows that each token attends to */
    const int32_t *pages, *tables; /* a paged cache, as in nbi_op_attention; NULL: not paged */
    int64_t page_count;            /* entries of pages */
    int64_t decode_rows;           /* leading tokens of short inputs, as decode steps have */
    int64_t M;                     /* rows of logits to compute */
    const int32_t *rows;           /* [M] the tokens that they follow, ascending */
    const struct nbi_kv_view *kv;  /* [layers] */
    enum nbi_matmul matmul;        /* of all products and of attention */
    bool batch_invariant;          /* no token's bits depend on the other rows of the pass */
    bool one_row_per_sequence;     /* every token belongs to another sequence */
    /* A backward pass follows: keep what it reads in the activations. For it, the last token that
     * attends to each one, and the tokens in the order of nbi_op_embed_bwd. */
    bool training;
    const int32_t *end, *order; /* [N] */
    /* Called after each layer, whose output x [N, C] is on the device; NULL: none. */
    enum nb_status (*after_layer)(void *ctx, int64_t layer, struct nbi_ptr x);
    void *ctx;
};

/* Whether the wanted rows are all rows in order, so that no gather is needed. */
bool nbi_pass_wants_all_rows(const struct nbi_pass *pass);

/* Queues the operations of a pass whose index arrays are in a->indices. See nbi_execute(). */
enum nb_status nbi_forward(const struct nbi_weights *w, const struct nbi_acts *a,
                           struct nbi_stream *s, const struct nbi_pass *pass);

/* The last step of it: logits [M, V] of the rows in a->rows, from the residual stream in a->x. */
enum nb_status nbi_forward_head(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *pass);

/* Recomputes for the backward pass what a layer keeps, from its input. */
enum nb_status nbi_forward_layer(const struct nbi_weights *w, const struct nbi_acts *a,
                                 struct nbi_stream *s, const struct nbi_pass *pass, int64_t layer);

/* ---- loss ---- */

#define NBI_REF_IDS 64 /* limit of ref_k: ids of the reference model that are known for a row */

/* The rows of a pass that predict a token. All arrays are host memory. NB_LOSS_CE is cross entropy;
 * NB_LOSS_SCALAR the mean absolute difference between the final norm and the embedding of the
 * target, which counts as a constant, without the head. */
struct nbi_labels {
    enum nb_loss kind;
    int64_t count;
    const int32_t *rows;    /* [count] ascending, no row twice */
    const int32_t *targets; /* [count] the id that each predicts */
    float scale;            /* of the gradient: 1 / labels of the whole batch */
    /* Probabilities of a reference model, for cross entropy with a KL term; ref_k 0: none. */
    int64_t ref_k;
    const int32_t *ref_ids; /* [count, ref_k] distinct; a negative first id: none for this row */
    const float *ref_p;     /* [count, ref_k] */
    float kl_scale;         /* of the gradient of KL(reference || model) */
    /* Out, the caller's: each row's loss and, with a reference, divergence; valid after the stream
     * was synced. */
    float *losses, *kls; /* [count] */
};

/* Computes the losses after a pass over the same activations with M = 0, a->M rows of logits at a
 * time. With grads (may be NULL), gives head and final norm their gradients and leaves that of the
 * residual stream in a->d.x. Asynchronous: until the stream is synced, labels->losses and kls are
 * written to. */
enum nb_status nbi_loss(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                        const struct nbi_pass *pass, const struct nbi_labels *labels,
                        const struct nbi_grads *grads);

/* The sums over the rows, in order. The stream has been synced. kl: 0 without a reference. */
struct nbi_loss_sums {
    double loss, kl;
};

struct nbi_loss_sums nbi_loss_sums(const struct nbi_labels *labels);

/* ---- backward ---- */

/* after_layer is called as soon as all operations for a layer's gradients are queued. */
struct nbi_backward_hook {
    enum nb_status (*after_layer)(void *ctx, int64_t layer);
    void *ctx;
};

/* Continues from nbi_loss(): through the layers from the last to grads->first_layer, then, without
 * slices, to the embedding. hook may be NULL. Asynchronous. */
enum nb_status nbi_backward(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                            const struct nbi_pass *pass, const struct nbi_grads *grads,
                            const struct nbi_backward_hook *hook);

/* after_slice is called as soon as all operations for the gradients of rows slice * slice_rows and
 * on of embedding and head are queued, before those of the next slice overwrite them. */
struct nbi_slice_hook {
    enum nb_status (*after_slice)(void *ctx, int64_t slice);
    void *ctx;
};

/* With grads->slice_rows, after nbi_backward(): the gradients of embedding and head, some rows of
 * the vocabulary at a time. Computes their logits again, so the hook may change no other rows.
 * Nothing to do if neither is trained. Asynchronous. */
enum nb_status nbi_backward_slices(const struct nbi_weights *w, struct nbi_acts *a,
                                   struct nbi_stream *s, const struct nbi_pass *pass,
                                   const struct nbi_labels *labels, const struct nbi_grads *grads,
                                   const struct nbi_slice_hook *hook);
