/* batches.h - a batch as one pass of the model: rows of tokens side by side, of which each sees its
 * own sequence up to itself. */
#pragma once

#include "data/loader.h"
#include "model/transformer.h"

struct nbi_feed {
    int64_t N; /* tokens at most */
    int64_t V; /* ids from here on are refused; 0: nobody checks */
    int32_t *slots, *first, *last, *rows, *targets;
    struct nbi_kv_store *stores;
    float *losses; /* room for those of as many rows as there are logits */
    struct nbi_pass pass;
    struct nbi_labels labels;
};

/* acts must be made for training, and stay where they are. */
enum nb_status nbi_feed_init(struct nbi_feed *f, const struct nbi_acts *acts);
void nbi_feed_release(struct nbi_feed *f);

/* Sets pass and labels (rows, targets and room); the batch must stay. */
enum nb_status nbi_feed_set(struct nbi_feed *f, const struct nbi_batch *batch);

int64_t nbi_feed_bytes(const struct nbi_config *c, int64_t N);
