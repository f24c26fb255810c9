/* batches.c - the index arrays of a pass over a batch. */
#include "train/batches.h"

int64_t nbi_train_pass_bytes(const struct nbi_config *c, int64_t N)
{
    return N * (int64_t)(5 * sizeof(int32_t) + sizeof(float)) +
           c->layers * (int64_t)sizeof(struct nbi_kv_view);
}

enum nb_status nbi_train_pass_init(struct nbi_train_pass *f, const struct nbi_acts *acts)
{
    size_t N = (size_t)acts->N, layers = (size_t)acts->layer_count;
    NBI_BUG_IF(acts->M > acts->N);
    *f = (struct nbi_train_pass){.N = acts->N};
    f->kv_rows = malloc(5 * N * sizeof *f->kv_rows);
    f->kv = malloc(layers * sizeof *f->kv);
    f->losses = malloc(N * sizeof *f->losses); /* logits are of N rows at most */
    if (!f->kv_rows || !f->kv || !f->losses)
        return nbi_fail_memory("batch", 5 * N * sizeof *f->kv_rows);
    f->first = f->kv_rows + N;
    f->last = f->first + N;
    f->rows = f->last + N;
    f->targets = f->rows + N;
    for (size_t i = 0; i < layers; i++)
        f->kv[i] = acts->layers[i].kv;
    return NB_OK;
}

void nbi_train_pass_release(struct nbi_train_pass *f)
{
    free(f->kv_rows);
    free(f->kv);
    free(f->losses);
    *f = (struct nbi_train_pass){0};
}

enum nb_status nbi_train_pass_set(struct nbi_train_pass *f, const struct nbi_microbatch *b)
{
    int64_t N = b->B * b->T;
    NBI_BUG_IF(N > f->N);
    for (int64_t n = 0; n < N && f->V > 0; n++)
        if (b->ids[n] < 0 || b->ids[n] >= f->V || b->targets[n] >= f->V)
            return nbi_fail(NB_EVALUE, "token id %d is outside the model's vocabulary of %lld",
                            b->targets[n] >= f->V ? b->targets[n] : b->ids[n], (long long)f->V);
    f->labels = (struct nbi_labels){.rows = f->rows, .targets = f->targets, .scratch = f->losses};
    for (int64_t n = 0; n < N; n++) {
        f->kv_rows[n] = f->last[n] = (int32_t)n;
        f->first[n] = (int32_t)n - b->positions[n];
        if (b->targets[n] < 0)
            continue;
        f->rows[f->labels.count] = (int32_t)n;
        f->targets[f->labels.count++] = b->targets[n];
    }
    f->pass = (struct nbi_pass){.N = N,
                                .ids = b->ids,
                                .positions = b->positions,
                                .kv_rows = f->kv_rows,
                                .first = f->first,
                                .last = f->last,
                                .rows = f->rows,
                                .kv = f->kv,
                                .exact = true};
    return NB_OK;
}
