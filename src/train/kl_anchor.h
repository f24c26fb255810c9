/* kl_anchor.h - the reference model's probabilities, for KL(reference || model).
 *
 * The reference is the model as it was before training. For every labelled token of a data set the
 * anchor keeps the most likely ids and their probabilities; all other ids count as one bucket.
 * It covers examples that fit into a row: they are never cut, so their context and with it their
 * probabilities do not depend on how rows are packed. Longer documents may be cut anywhere and
 * have no anchor. */
#pragma once

#include "train/batches.h"

#define NBI_KL_ANCHOR_MEMORY ((int64_t)64 << 20) /* beyond this many bytes, a file */

struct nbi_kl_anchor_opts {
    struct nbi_dataset *data;  /* borrowed */
    int64_t first_example;     /* number of data's first example in example_of (data/mix.h) */
    int64_t memory_limit;      /* bytes; more go to an unlinked temporary file */
    const char *spill_next_to; /* a path; that file is made in the directory it is in */
    nb_progress_fn progress;   /* in labelled tokens; may be NULL */
    void *progress_ctx;
};

struct nbi_kl_anchor {
    struct nbi_kl_anchor_opts opts;
    int64_t ref_k;        /* ids per token */
    int64_t *first;       /* [examples + 1] first record of each example */
    char *memory;         /* records of ref_k ids and ref_k probabilities; NULL: in fd */
    int fd;               /* -1: in memory */
    double mean_top_logp; /* mean log of the largest probability; tells references apart */
    int32_t *ref_ids;     /* [N, ref_k] of the current micro-batch, for its labels */
    float *ref_p;
};

/* What a pass over a micro-batch takes; all borrowed. */
struct nbi_kl_anchor_pass {
    const struct nbi_weights *weights;
    struct nbi_acts *acts;
    struct nbi_stream *stream;
    struct nbi_train_pass *pass;
    struct nbi_microbatch *batch; /* of the size of training; overwritten */
};

/* Runs the reference over all examples. Call nbi_kl_anchor_release also after a failure; it
 * accepts a zeroed struct. */
enum nb_status nbi_kl_anchor_init(struct nbi_kl_anchor *a, const struct nbi_kl_anchor_opts *opts,
                                  const struct nbi_kl_anchor_pass *pass);
void nbi_kl_anchor_release(struct nbi_kl_anchor *a);

/* Adds the reference to the labels of a micro-batch; *count: labels that have one. */
enum nb_status nbi_kl_anchor_set(const struct nbi_kl_anchor *a, const struct nbi_microbatch *batch,
                                 struct nbi_labels *labels, int64_t *count);

/* Upper bound of the memory for micro-batches of N tokens. */
int64_t nbi_kl_anchor_bytes(int64_t N);

/* The k largest of V logits, most likely first, and their probabilities. */
enum nb_status nbi_kl_anchor_topk(const float *logits, int64_t V, int64_t k, int32_t *ids,
                                  float *p);
