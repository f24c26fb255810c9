/* loss.c - the losses of docs/MODEL.md, and their gradient down to the residual stream.
 *
 * Logits of all labelled rows at once would need gigabytes, so they are computed, used and
 * overwritten a->M rows at a time. The sums are taken on the host in the order of the rows, and so
 * do not depend on a->M. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "model/transformer.h"

struct loss {
    const struct nbi_weights *w;
    struct nbi_acts *a;
    struct nbi_stream *s;
    const struct nbi_grads *g; /* NULL: no gradients */
    const struct nbi_labels *l;
};

/* Cross entropy of labels [first, first + M), plus the KL term if the labels have one. The gradient
 * of `final` goes to d.norm. */
static enum nb_status cross_entropy(const struct loss *x, int64_t first, int64_t M)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    const struct nbi_labels *l = x->l;
    int64_t C = x->w->config->hidden_size, k = l->ref_k, bytes = M * k * (int64_t)sizeof(float);
    /* logits = final Whead^T */
    NBI_TRY(be->linear(x->s, &(struct nbi_op_linear){.count = 1,
                                                     .y = {a->logits},
                                                     .w = {x->w->head},
                                                     .x = a->final,
                                                     .N = M,
                                                     .K = C,
                                                     .matmul = NBI_MATMUL_F32}));
    if (k > 0) {
        NBI_TRY(be->upload(x->s, a->d.ref_ids, l->ref_ids + first * k, bytes));
        NBI_TRY(be->upload(x->s, a->d.ref_p, l->ref_p + first * k, bytes));
    }
    NBI_TRY(be->xent(x->s, &(struct nbi_op_xent){.loss = a->d.loss,
                                                 .dlogits = x->g ? a->logits : (struct nbi_ptr){0},
                                                 .logits = a->logits,
                                                 .targets = a->d.targets,
                                                 .scale = l->scale,
                                                 .kl = a->d.kl,
                                                 .ref_ids = a->d.ref_ids,
                                                 .ref_p = a->d.ref_p,
                                                 .kl_scale = l->kl_scale,
                                                 .ref_k = k,
                                                 .N = M,
                                                 .V = x->w->config->vocab_size}));
    if (!x->g)
        return NB_OK;
    return be->linear_bwd(x->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                            .dx = a->d.norm,
                                                            .dw = {x->g->head},
                                                            .dy = {a->logits},
                                                            .w = {x->w->head},
                                                            .x = a->final,
                                                            .N = M,
                                                            .K = C});
}

/* Mean absolute difference between `final` and the embedding of the target, which counts as a
 * constant. The gradient of `final` goes to d.norm. */
static enum nb_status embedding_distance(const struct loss *x, int64_t M)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    int64_t C = x->w->config->hidden_size;
    NBI_TRY(be->embed(
        x->s,
        &(struct nbi_op_embed){
            .x = a->d.target_embed, .ids = a->d.targets, .table = x->w->embed, .N = M, .C = C}));
    return be->l1(x->s, &(struct nbi_op_l1){.loss = a->d.loss,
                                            .dx = x->g ? a->d.norm : (struct nbi_ptr){0},
                                            .x = a->final,
                                            .target = a->d.target_embed,
                                            .weight = a->d.ones,
                                            .scale = x->l->scale,
                                            .N = M,
                                            .C = C});
}

/* Losses of labels [first, first + M) to a->d.loss; gradients to the weights and to d.x. */
static enum nb_status loss_of_rows(const struct loss *x, int64_t first, int64_t M)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    const struct nbi_labels *l = x->l;
    int64_t C = x->w->config->hidden_size, ints = M * (int64_t)sizeof(int32_t);
    NBI_TRY(be->upload(x->s, a->rows, l->rows + first, ints));
    NBI_TRY(be->upload(x->s, a->d.targets, l->targets + first, ints));
    /* final = rmsnorm(x of the rows); d.final keeps what went into the norm */
    NBI_TRY(be->gather(x->s, &(struct nbi_op_gather){
                                 .y = a->d.final, .x = a->x, .rows = a->rows, .M = M, .C = C}));
    NBI_TRY(be->rmsnorm(x->s, &(struct nbi_op_rmsnorm){.y = a->final,
                                                       .rstd = a->d.rstd,
                                                       .x = a->d.final,
                                                       .w = x->w->norm,
                                                       .eps = (float)x->w->config->rms_eps,
                                                       .N = M,
                                                       .C = C}));
    NBI_TRY(l->kind == NB_LOSS_SCALAR ? embedding_distance(x, M) : cross_entropy(x, first, M));
    if (!x->g)
        return NB_OK;
    /* rmsnorm_bwd adds to dx. `final` is no longer needed and takes the gradient of its rows. */
    NBI_TRY(be->clear(x->s, a->final, M * C * (int64_t)sizeof(float)));
    NBI_TRY(be->rmsnorm_bwd(x->s, &(struct nbi_op_rmsnorm_bwd){.dx = a->final,
                                                               .dw = x->g->norm,
                                                               .dy = a->d.norm,
                                                               .x = a->d.final,
                                                               .rstd = a->d.rstd,
                                                               .w = x->w->norm,
                                                               .N = M,
                                                               .C = C}));
    return be->scatter(x->s, &(struct nbi_op_scatter){
                                 .y = a->d.x, .x = a->final, .rows = a->rows, .M = M, .C = C});
}

/* Waits for M values of the device and adds them to *sum, in order. */
static enum nb_status add_to_sum(const struct loss *x, struct nbi_ptr from, float *values,
                                 int64_t M, double *sum)
{
    NBI_TRY(x->w->be->download(x->s, values, from, M * (int64_t)sizeof *values));
    NBI_TRY(x->w->be->sync(x->s));
    for (int64_t i = 0; i < M; i++)
        *sum += (double)values[i];
    return NB_OK;
}

enum nb_status nbi_loss(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                        const struct nbi_pass *p, struct nbi_labels *l, const struct nbi_grads *g)
{
    const struct loss x = {w, a, s, g, l};
    float *values = l->scratch;
    NBI_BUG_IF(l->ref_k > NBI_REF_IDS || (l->ref_k > 0 && l->kind != NB_LOSS_CE));
    l->loss = l->kl = 0;
    if (g)
        NBI_TRY(w->be->clear(s, a->d.x, p->N * w->config->hidden_size * (int64_t)sizeof(float)));
    for (int64_t i = 0; i < a->M; i++)
        values[i] = 1;
    if (l->kind == NB_LOSS_SCALAR)
        NBI_TRY(w->be->upload(s, a->d.ones, values, a->M * (int64_t)sizeof *values));
    for (int64_t i = 0; i < l->count; i += a->M) {
        int64_t M = l->count - i < a->M ? l->count - i : a->M;
        NBI_TRY(loss_of_rows(&x, i, M));
        NBI_TRY(add_to_sum(&x, a->d.loss, values, M, &l->loss));
        if (l->ref_k > 0)
            NBI_TRY(add_to_sum(&x, a->d.kl, values, M, &l->kl));
    }
    return NB_OK;
}
