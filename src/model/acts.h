/* acts.h - activations: what a pass works in, and where the pieces of it lie. */
#pragma once

#include "backend/backend.h"
#include "model/config.h"

struct nbi_weights;

struct nbi_layer_acts {
    struct nbi_ptr norm1, q, k, v, q_rot, att, norm2, gate, up, act; /* [N, ...] */
    /* Training only: the residual stream before the layer and between its halves, what norms and
     * softmaxes keep, and this layer's own keys and values. */
    struct nbi_ptr in, mid, rstd1, rstd2, rstd_q, rstd_k, lse;
    struct nbi_kv_view kv;
};

/* What the backward pass works in; gradients of the quantity of the same name. */
struct nbi_backward_acts {
    struct nbi_ptr x, norm, att, q, k, v, act; /* [N, ...] */
    struct nbi_ptr final, rstd, loss, targets; /* of M rows of logits */
    struct nbi_ptr wanted, ones;               /* of M rows, for NBI_LOSS_SCALAR */
    struct nbi_ptr kl, ref_ids, ref_p;         /* of M rows */
};

struct nbi_acts {
    struct nbi_backend *be;
    int64_t N;      /* rows at most */
    int64_t M;      /* rows of logits at most */
    bool recompute; /* training: layers keep `in` alone */
    int64_t first_layer;
    struct nbi_ptr block;
    int64_t bytes;
    int64_t page_count; /* of a pass at most; 0: passes have no pages */
    int64_t topk_rows;  /* rows of logits of which the best can be had */
    /* Of the pass at hand, one behind the other: what it says of each token, rows, pages. int32. */
    struct nbi_ptr indices, ids, positions, kv_rows, first, last, tables, rows, pages;
    int32_t *packed;     /* the same, of the host */
    int64_t max_keys[2]; /* rows that a token sees, at most; of the pass's decode_rows, of others */
    struct nbi_ptr cos, sin;
    struct nbi_ptr x;                  /* [N, C] residual stream */
    struct nbi_ptr final;              /* [M, C] */
    struct nbi_ptr logits;             /* [M, V] */
    struct nbi_ptr topk, topk_scratch; /* see nbi_execute_topk */
    struct nbi_layer_acts *layers;     /* of inference, all the same */
    int64_t layer_count;
    struct nbi_backward_acts d; /* training only */
    struct nbi_megakernel
        *megakernel; /* single tokens at once, if the backend can; see nbi_acts_use_megakernel */
};

struct nbi_acts_opts {
    int64_t N, M;       /* rows of a pass at most, and of its logits */
    int64_t page_count; /* of a pass at most; 0: the stores are not paged */
    int64_t topk_rows;  /* rows of logits whose best are wanted at a time; 0: 1 */
    /* Training: */
    bool recompute;
    int64_t first_layer; /* that has a backward pass */
};

/* Room for passes without keeping anything per layer. */
enum nb_status nbi_acts_init(struct nbi_acts *a, struct nbi_backend *be, const struct nbi_config *c,
                             const struct nbi_acts_opts *opts);
int64_t nbi_acts_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);
int64_t nbi_acts_host_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);

/* Room for training: a forward pass that keeps what the backward pass needs, of all layers or, to
 * recompute the rest, only what goes into each. Logits are made M rows at a time. */
enum nb_status nbi_acts_init_training(struct nbi_acts *a, struct nbi_backend *be,
                                      const struct nbi_config *c, const struct nbi_acts_opts *opts);
int64_t nbi_acts_training_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);

/* From now on passes over a single token with these stores go through the backend's own way, where
 * it has one for the model. The stores and the stream stay. */
enum nb_status nbi_acts_use_megakernel(struct nbi_acts *a, const struct nbi_weights *w,
                                       struct nbi_stream *s, const struct nbi_kv_view *stores);

void nbi_acts_release(struct nbi_acts *a);

/* What a stream needs for passes of up to N rows, there or also back. */
struct nbi_stream_limits nbi_stream_limits_for(const struct nbi_config *c, int64_t N, bool back);
