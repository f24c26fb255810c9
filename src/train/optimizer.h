/* optimizer.h - one update of the parameters from their gradients.
 *
 * Parameters are updated in groups: all at once, or layer by layer inside the backward pass, with
 * what belongs to no layer as the last group. The gradient of a group is clipped by its norm. If a
 * value of it is not finite, the group is left as it is, and counted. */
#pragma once

#include "train/parameters.h"

struct nbi_optimizer_opts {
    float beta1, beta2, eps;
    float decay;        /* of matrices */
    bool decay_all;     /* of vectors too */
    float clip;         /* largest norm of a group's gradient; 0: any */
    float max_update;   /* largest update of a value in units of lr; 0: any */
    int64_t chunk_rows; /* rows of a matrix that are updated at a time; 0: all */
    uint64_t seed;
};

struct nbi_optimizer {
    struct nbi_train_params *t;
    struct nbi_optimizer_opts opts;
    struct nbi_ptr stats;       /* f64 [count, 3] */
    struct nbi_ptr running_max; /* f32 [count, 2] */
    double *host_stats;
    float *host_running_max;
};

enum nb_status nbi_optimizer_init(struct nbi_optimizer *s, struct nbi_train_params *t,
                                  const struct nbi_optimizer_opts *opts);
void nbi_optimizer_release(struct nbi_optimizer *s);

struct nbi_optimizer_result {
    double squares;    /* of the gradient before clipping, summed over groups */
    int64_t nonfinite; /* values; then the group was not updated */
};

/* Layer `group`, -1 for what is in none, or NBI_ALL_LAYERS. number counts from 1. Updates masters,
 * moments and weights, and clears the gradients. Adds to *result. */
enum nb_status nbi_optimizer_step(struct nbi_optimizer *s, int64_t group, float lr, uint32_t number,
                                  struct nbi_optimizer_result *result);
