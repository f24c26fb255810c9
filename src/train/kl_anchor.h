/* kl_anchor.h - what a model thought before it was trained, for KL(base || model).
 *
 * For every labelled token of a set: the most likely ids and their probabilities; what is left is
 * one bucket. A sample is in one row whole and sees nothing else, so this depends on the sample
 * alone, however rows are packed. A document that is longer than a row may be cut anywhere, and
 * has nothing here. */
#pragma once

#include "train/batches.h"

#define NBI_KL_ANCHOR_MEMORY ((int64_t)64 << 20)

struct nbi_kl_anchor_opts {
    struct nbi_dataset *data;  /* borrowed */
    int64_t first_example;     /* samples numbered before those of data (mix.h) */
    int64_t memory_limit;      /* bytes; if it takes more, it goes to a file */
    const char *spill_next_to; /* a path beside which that file is made; it has no name */
};

struct nbi_kl_anchor {
    struct nbi_kl_anchor_opts opts;
    int64_t ref_k;        /* ids of a token */
    int64_t *first;       /* [samples + 1] where the tokens of each sample start */
    char *memory;         /* records of ref_k ids and ref_k probabilities, or */
    int fd;               /* -1: in memory */
    double mean_top_logp; /* the mean log of the largest probability: tells base models apart */
    int32_t *ref_ids;     /* [N, ref_k] of the batch, for labels */
    float *ref_p;
};

/* With what a pass over a batch needs; all borrowed. */
struct nbi_kl_anchor_pass {
    const struct nbi_weights *weights;
    struct nbi_acts *acts;
    struct nbi_stream *stream;
    struct nbi_train_pass *pass;
    struct nbi_microbatch *batch; /* its size is that of training */
};

/* Runs the model over all samples. nbi_kl_anchor_release also after a failure, or of zeros. */
enum nb_status nbi_kl_anchor_init(struct nbi_kl_anchor *b, const struct nbi_kl_anchor_opts *opts,
                                  const struct nbi_kl_anchor_pass *pass);
void nbi_kl_anchor_release(struct nbi_kl_anchor *b);

/* Adds to the labels that the feed has of a batch; *count: how many of them are known here. */
enum nb_status nbi_kl_anchor_set(const struct nbi_kl_anchor *b, const struct nbi_microbatch *batch,
                                 struct nbi_labels *labels, int64_t *count);

int64_t nbi_kl_anchor_bytes(int64_t N); /* of memory, at most */

/* The J largest of V logits, most likely first, and their probabilities. */
enum nb_status nbi_kl_anchor_topk(const float *logits, int64_t V, int64_t J, int32_t *ids,
                                  float *p);
