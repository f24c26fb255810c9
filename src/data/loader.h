/* loader.h - samples packed into rows of tokens, in an order that a seed decides.
 *
 * A row holds several samples one after the other. Positions start at 0 with each of them, and
 * that is all attention needs to keep them apart: the token at t sees from t - positions[t] to t.
 * Nothing predicts across a border. */
#pragma once

#include "data/dataset.h"

#define NBI_IGNORE (-100) /* target of a position that is not trained on */

struct nbi_microbatch {
    int64_t B, T;
    int32_t *ids;        /* [B, T] */
    int32_t *targets;    /* [B, T] the id that follows, or NBI_IGNORE */
    int32_t *positions;  /* [B, T] */
    int64_t *example_of; /* [B, T] which sample of the set a position is of; -1: none */
    int64_t tokens;      /* positions in use; the others are padding */
    int64_t trained;     /* targets that count */
    int64_t examples;    /* begun in this batch */
    int64_t truncated;   /* of them, shortened */
};

enum nb_status nbi_microbatch_init(struct nbi_microbatch *b, int64_t B, int64_t T);
void nbi_microbatch_release(struct nbi_microbatch *b);

/* Where the next batch starts. With the options, it decides all that follows: to resume, restore
 * it. */
struct nbi_loader_state {
    int64_t epoch;
    int64_t next;  /* samples of the epoch used so far */
    int64_t token; /* of the one that a batch ended in, a document; else 0 */
};

struct nbi_loader_opts {
    struct nbi_dataset *data; /* borrowed */
    uint64_t seed;
    bool shuffle;        /* another order in each epoch; else that of the files */
    bool pack;           /* else one sample a row */
    bool keep_documents; /* documents that fit into a row are not cut */
    int64_t epochs;      /* then there are no more batches, and each begins a batch; 0: no end, and
                            a batch goes on with the next */
    int32_t padding;     /* id of unused positions */
};

struct nbi_loader {
    struct nbi_loader_opts opts;
    struct nbi_loader_state state;
    uint32_t *order;     /* of the samples in epoch order_epoch */
    int64_t order_epoch; /* -1: none yet */
    int64_t *used;       /* [rows] positions taken in each row of the running batch */
    int64_t rows;
    size_t capacity; /* of used */
    struct nbi_example example;
    int64_t example_index; /* which one that is; -1: none */
};

enum nb_status nbi_loader_init(struct nbi_loader *l, const struct nbi_loader_opts *opts);
void nbi_loader_release(struct nbi_loader *l);

/* Puts the order of an epoch into l->order. */
void nbi_loader_order(struct nbi_loader *l, int64_t epoch);

/* Whether all epochs are over; else there is a next batch. */
bool nbi_loader_is_done(const struct nbi_loader *l);

/* Fills out (its B and T stay); *more false: nothing is left. A sample of more than T + 1 tokens is
 * shortened (nbi_example_truncate), a document goes on in the next row. */
enum nb_status nbi_loader_next(struct nbi_loader *l, struct nbi_microbatch *out, bool *more);

/* Passes over what the next batch of this size would hold, by the lengths of the samples alone:
 * nothing is read or tokenized. */
enum nb_status nbi_loader_skip(struct nbi_loader *l, int64_t B, int64_t T);
