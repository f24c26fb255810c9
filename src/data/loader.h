/* loader.h - shuffles examples and packs them into rows of tokens.
 *
 * A row holds several examples one after the other. Positions start at 0 with each of them, which
 * keeps them apart: the token at t attends to [t - positions[t], t]. No token is predicted across a
 * border between examples. */
#pragma once

#include "data/dataset.h"

#define NBI_IGNORE (-100) /* target of a position that is not trained on; as in PyTorch */

struct nbi_microbatch {
    int64_t B, T;        /* rows, positions of a row */
    int32_t *ids;        /* [B, T] */
    int32_t *targets;    /* [B, T] the next id, or NBI_IGNORE */
    int32_t *positions;  /* [B, T] */
    int64_t *example_of; /* [B, T] number of the example in its data set; -1: padding */
    int64_t tokens;      /* positions that are not padding */
    int64_t trained;     /* targets that are not NBI_IGNORE */
    int64_t examples;    /* that start in this micro-batch */
    int64_t truncated;   /* of those, shortened */
};

enum nb_status nbi_microbatch_init(struct nbi_microbatch *b, int64_t B, int64_t T);
void nbi_microbatch_release(struct nbi_microbatch *b);

/* Where the next micro-batch starts. Together with the options it determines all that follow, so
 * restoring it resumes the data. */
struct nbi_loader_state {
    int64_t epoch;
    int64_t next;  /* examples of the epoch used so far */
    int64_t token; /* where a document continues that the last micro-batch cut; else 0 */
};

struct nbi_loader_opts {
    struct nbi_dataset *data; /* borrowed */
    uint64_t seed;
    bool shuffle;        /* in a new order each epoch; otherwise in that of the files */
    bool pack;           /* otherwise one example per row */
    bool keep_documents; /* do not cut documents that fit into a row */
    int64_t epochs;      /* stop after these, and start each epoch in a new micro-batch; 0: repeat
                            forever, and let a micro-batch continue into the next epoch */
    int32_t padding;     /* id of unused positions */
};

struct nbi_loader {
    struct nbi_loader_opts opts;
    struct nbi_loader_state state;
    uint32_t *order;     /* of the examples in epoch order_epoch */
    int64_t order_epoch; /* -1: none yet */
    int64_t *used;       /* [rows] positions filled in each row of the current micro-batch */
    int64_t rows;
    size_t capacity; /* of used */
    struct nbi_example example;
    int64_t example_index; /* its number; -1: none */
};

enum nb_status nbi_loader_init(struct nbi_loader *l, const struct nbi_loader_opts *opts);
void nbi_loader_release(struct nbi_loader *l);

/* Computes the order of an epoch in l->order. */
void nbi_loader_order(struct nbi_loader *l, int64_t epoch);

/* Whether all epochs have ended; if not, there is a next micro-batch. */
bool nbi_loader_is_done(const struct nbi_loader *l);

/* Fills out, whose B and T are set. *more false: no data is left. A conversation of more than T + 1
 * tokens is shortened (nbi_example_truncate); a document continues in the next row. */
enum nb_status nbi_loader_next(struct nbi_loader *l, struct nbi_microbatch *out, bool *more);

/* Advances over the next micro-batch of this size, without reading or tokenizing anything. */
enum nb_status nbi_loader_skip(struct nbi_loader *l, int64_t B, int64_t T);
