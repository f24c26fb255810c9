/* optimizer.h - AdamW: updates the parameters from their gradients.
 *
 * Parameters are updated in groups: all at once, or layer by layer inside the backward pass with
 * the parameters of no layer as the last group. A group's gradient is clipped by its norm. If it
 * has a non-finite value, the group is not updated. */
#pragma once

#include "train/parameters.h"

struct nbi_optimizer_opts {
    float beta1, beta2, eps;
    float decay;        /* weight decay of matrices, decoupled */
    bool decay_all;     /* decay vectors too */
    float clip;         /* limit of the norm of a group's gradient; 0: none */
    float max_update;   /* limit of a value's update in units of lr; 0: none */
    int64_t chunk_rows; /* rows of a matrix per AdamW operation; 0: all */
    uint64_t seed;
};

struct nbi_optimizer {
    struct nbi_train_params *t;
    struct nbi_optimizer_opts opts;
    struct nbi_ptr stats;       /* f64 [count, 3]: sum of squares, amax, non-finite values */
    struct nbi_ptr running_max; /* f32 [count, 2]: of |m| and sqrt(v) */
    double *host_stats;
    float *host_running_max;
};

enum nb_status nbi_optimizer_init(struct nbi_optimizer *s, struct nbi_train_params *t,
                                  const struct nbi_optimizer_opts *opts);
void nbi_optimizer_release(struct nbi_optimizer *s);

struct nbi_optimizer_result {
    double squares;    /* squared norm of the gradient before clipping, summed over groups */
    int64_t nonfinite; /* gradient values; their groups were not updated */
};

/* Updates masters, moments and weights of a group, and clears its gradients. group: a layer, -1 for
 * the parameters of no layer, or NBI_ALL_LAYERS. number: Adam's step, from 1. Adds to *result. */
enum nb_status nbi_optimizer_step(struct nbi_optimizer *s, int64_t group, float lr, uint32_t number,
                                  struct nbi_optimizer_result *result);
