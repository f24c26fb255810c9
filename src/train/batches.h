/* batches.h - a micro-batch as one training pass of the model.
 *
 * Rows become one long list of tokens. Each token attends to its own sequence up to and including
 * itself; keys and values of all tokens stand in the activations, in the order of the tokens. */
#pragma once

#include "data/loader.h"
#include "model/execute.h"

struct nbi_train_pass {
    int64_t N; /* limit of tokens */
    int64_t V; /* ids of V and above are refused; 0: ids are not checked */
    enum nbi_matmul matmul;
    int32_t *kv_rows, *first, *last, *end, *order, *rows, *targets; /* [N] each, one allocation */
    struct nbi_kv_view *kv;                                         /* [layers] */
    float *losses, *kls;                                            /* [N] each, one allocation */
    struct nbi_pass pass; /* set by nbi_train_pass_set, borrows the arrays above */
    struct nbi_labels labels;
};

/* acts must have been made for training and must outlive f. */
enum nb_status nbi_train_pass_init(struct nbi_train_pass *f, const struct nbi_acts *acts);
void nbi_train_pass_release(struct nbi_train_pass *f);

/* Sets pass and labels (rows, targets, losses) from a micro-batch, whose ids and positions are
 * borrowed. The caller adds the labels' kind and scale. Not before the passes queued with f have
 * run, unless their labels got memory of their own for losses. */
enum nb_status nbi_train_pass_set(struct nbi_train_pass *f, const struct nbi_microbatch *batch);

/* Host memory that nbi_train_pass_init allocates. */
int64_t nbi_train_pass_bytes(const struct nbi_config *c, int64_t N);
