/* batches.h - a batch as one pass of the model: rows of tokens side by side, of which each sees its
 * own sequence up to itself. */
#pragma once

#include "data/loader.h"
#include "model/execute.h"

struct nbi_train_pass {
    int64_t N; /* tokens at most */
    int64_t V; /* ids from here on are refused; 0: nobody checks */
    int32_t *kv_rows, *first, *last, *rows, *targets;
    struct nbi_kv_view *kv;
    float *losses; /* room for those of as many rows as there are logits */
    struct nbi_pass pass;
    struct nbi_labels labels;
};

/* acts must be made for training, and stay where they are. */
enum nb_status nbi_train_pass_init(struct nbi_train_pass *f, const struct nbi_acts *acts);
void nbi_train_pass_release(struct nbi_train_pass *f);

/* Sets pass and labels (rows, targets and room); the batch must stay. */
enum nb_status nbi_train_pass_set(struct nbi_train_pass *f, const struct nbi_microbatch *batch);

int64_t nbi_train_pass_bytes(const struct nbi_config *c, int64_t N);
