/* optimizer.h - AdamW: updates the parameters from their gradients.
 *
 * Parameters are updated in groups: all at once, or layer by layer inside the backward pass with
 * the parameters of no layer as the last group. Embedding and head may be updated in slices of
 * rows, each of both a group of its own; such a tensor has a record, and so scales of its moments,
 * for each slice. A group's gradient is clipped by its norm. If it has a non-finite value, the
 * group is not updated. */
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

/* Groups are numbered: 0 has the parameters of no layer, 1 + i those of layer i, 1 + layers all;
 * then come the slices. */
struct nbi_optimizer {
    struct nbi_train_params *t;
    struct nbi_optimizer_opts opts;
    int64_t slices;
    int64_t record_count;   /* t->count, then the slices of the embedding, then those of the head */
    struct nbi_ptr records; /* struct nbi_update_record [record_count] */
    struct nbi_ptr controls; /* struct nbi_update_control [layers + 2 + slices] */
    struct nbi_ptr tensors;  /* int32, for each group the numbers of its records */
    int64_t *first;          /* [layers + 3 + slices] where each group begins in it */
    struct nbi_update_control *host_controls;
    bool *queued; /* groups with an update since the last nbi_optimizer_finish() */
};

/* The bytes of the blocks that nbi_optimizer_init asks the backend for: records, controls, tensors.
 */
#define NBI_OPTIMIZER_BLOCKS 3

void nbi_optimizer_plan(int64_t layers, int64_t tensors, int64_t slices,
                        int64_t bytes[NBI_OPTIMIZER_BLOCKS]);

enum nb_status nbi_optimizer_init(struct nbi_optimizer *s, struct nbi_train_params *t,
                                  const struct nbi_optimizer_opts *opts);
void nbi_optimizer_release(struct nbi_optimizer *s);

struct nbi_optimizer_result {
    double squares;    /* squared norm of the gradient before clipping, summed over groups */
    int64_t nonfinite; /* gradient values; their groups were not updated */
};

/* Queues the update of masters, moments and weights of a group: a layer, -1 for the parameters of
 * no layer, or NBI_ALL_LAYERS. number: Adam's step, from 1. Asynchronous, except that models with
 * NVFP4 tensor scales wait for the masters' amax. */
enum nb_status nbi_optimizer_step(struct nbi_optimizer *s, int64_t group, float lr,
                                  uint32_t number);

/* The same of a slice of embedding and head. -1 then has the other parameters of no layer. */
enum nb_status nbi_optimizer_step_slice(struct nbi_optimizer *s, int64_t slice, float lr,
                                        uint32_t number);

/* Waits for the queued updates; *result has what they found. */
enum nb_status nbi_optimizer_finish(struct nbi_optimizer *s, struct nbi_optimizer_result *result);

/* The records, between host and backend. Synchronous. */
enum nb_status nbi_optimizer_read(struct nbi_optimizer *s, struct nbi_update_record *records);
enum nb_status nbi_optimizer_write(struct nbi_optimizer *s,
                                   const struct nbi_update_record *records);
