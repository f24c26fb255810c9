/* acts.h - activations: the memory that a pass works in, as one block that is planned beforehand.
 *
 * Inference keeps nothing per layer; training keeps what the backward pass reads. A pointer that a
 * pass does not use is none ({0}), and operations skip optional outputs that are none.
 *
 * Activations of training are f32 or bf16; sums, statistics and losses are always f32. */
#pragma once

#include "backend/backend.h"
#include "model/config.h"

struct nbi_layer_acts {
    struct nbi_ptr norm1, q, k, v, q_rot, att, norm2, gate, up, act; /* [N, ...] */
    /* Row strides of q, k and v, and of gate and up; 0: contiguous. In training these are columns
     * of the same rows, so that products with them can be one. */
    int64_t ld_qkv, ld_gate;
    /* Training only: the residual stream before the layer (in) and between its halves (mid),
     * statistics of the norms and the softmax, and this layer's keys and values. */
    struct nbi_ptr in, mid, rstd1, rstd2, rstd_q, rstd_k, lse;
    struct nbi_kv_view kv;
};

/* Memory of the backward pass: each is the gradient of the quantity with its name. */
struct nbi_backward_acts {
    struct nbi_ptr x, norm, att, q, k, v, act; /* [N, ...]; q, k and v with ld_qkv */
    /* Of a->M rows of the loss. `final` is the input of the final norm, not a gradient. */
    struct nbi_ptr final, rstd;
    struct nbi_ptr target_embed, ones; /* NB_LOSS_SCALAR */
    /* Of all labels of a pass, [N]: losses, and for NB_LOSS_CE with a reference model divergences,
     * ids and probabilities. */
    struct nbi_ptr loss, targets, kl, ref_ids, ref_p;
    /* With slices: [N] struct nbi_xent_kept, and after the layers the final norm of all labels. */
    struct nbi_ptr kept, all_final;
};

struct nbi_acts {
    struct nbi_backend *be;
    int64_t N;            /* limit of rows of a pass */
    int64_t M;            /* limit of rows of logits */
    int64_t page_count;   /* limit of pages of a pass; 0: the cache is not paged */
    int64_t topk_rows;    /* limit of rows that nbi_execute_topk() takes */
    enum nbi_dtype dtype; /* f32, or for training bf16 */
    bool training;        /* made for backward passes */
    bool recompute;       /* training: layers keep only their input */
    bool slices;          /* training: labels stay for nbi_backward_slices() */
    int64_t first_layer;
    struct nbi_ptr block; /* everything below lies in it */
    int64_t bytes;
    /* The index arrays of the current pass, int32: one block, and where each array is in it. */
    struct nbi_ptr indices, ids, positions, kv_rows, first, last, tables, rows, pages;
    struct nbi_ptr end, order; /* training, see nbi_pass */
    int32_t *packed;           /* host: the block before its upload */
    int64_t max_keys[2]; /* bound on the rows that a token sees: of decode rows, of the others */
    struct nbi_ptr cos, sin;
    struct nbi_ptr x;      /* [N, C] residual stream; in training only after the last layer */
    struct nbi_ptr final;  /* [M, C] */
    struct nbi_ptr logits; /* [M, V] */
    struct nbi_ptr topk, topk_scratch; /* see nbi_execute_topk() */
    struct nbi_layer_acts *layers;     /* [layer_count]; all the same for inference */
    int64_t layer_count;
    struct nbi_backward_acts d;        /* training only */
    struct nbi_megakernel *megakernel; /* NULL: none, see nbi_execute_use_megakernel() */
};

struct nbi_acts_opts {
    int64_t N, M;       /* limits of rows of a pass, and of rows of logits */
    int64_t page_count; /* limit of pages of a pass; 0: the cache is not paged */
    int64_t topk_rows;  /* limit of rows for top-k; 0: 1 */
    /* Training: */
    enum nbi_dtype dtype; /* bf16; else f32 */
    bool recompute, slices;
    int64_t first_layer; /* the first with a backward pass */
};

/* Activations for inference. The two sizes are what it allocates, on the device and on the host. */
enum nb_status nbi_acts_init(struct nbi_acts *a, struct nbi_backend *be, const struct nbi_config *c,
                             const struct nbi_acts_opts *opts);
int64_t nbi_acts_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);
int64_t nbi_acts_host_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);

/* Activations for training: each layer keeps what its backward pass reads, or with `recompute`
 * only its input. */
enum nb_status nbi_acts_init_training(struct nbi_acts *a, struct nbi_backend *be,
                                      const struct nbi_config *c, const struct nbi_acts_opts *opts);
int64_t nbi_acts_training_bytes(const struct nbi_config *c, const struct nbi_acts_opts *opts);

void nbi_acts_release(struct nbi_acts *a);

/* Bytes of n activations. */
static inline int64_t nbi_acts_size(const struct nbi_acts *a, int64_t n)
{
    return (int64_t)nbi_dtype_bytes(a->dtype, n);
}

/* Rows of logits to keep at a time: as many as fit into 32 MB, but from min up to max. */
int64_t nbi_logits_rows(int64_t vocab, int64_t min, int64_t max);

/* Bytes of a->topk for M rows of k candidates. */
static inline int64_t nbi_topk_bytes(int64_t M, int64_t k)
{
    return M * (1 + 2 * k) * (int64_t)sizeof(int32_t);
}

/* What a stream needs for passes of up to N rows; training: for backward passes as well. */
struct nbi_stream_limits nbi_stream_limits_for(const struct nbi_config *c, int64_t N,
                                               bool training);
