/* loss.c - the losses of docs/MODEL.md, and their gradient down to the residual stream.
 *
 * Logits of all labelled rows at once would need gigabytes, so they are computed, used and
 * overwritten a->M rows at a time. Losses stay on the device until all are known. The sums are
 * taken on the host in the order of the rows, and so do not depend on a->M.
 *
 * With slices the head's gradient is left to nbi_backward_slices(), which computes logits of some
 * ids of all rows again. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "model/transformer.h"

struct loss {
    const struct nbi_weights *w;
    struct nbi_acts *a;
    struct nbi_stream *s;
    const struct nbi_pass *p;
    const struct nbi_grads *g; /* NULL: no gradients */
    const struct nbi_labels *l;
    int64_t C;
    bool bf16;
};

/* Labels [first, first + M), and where their rows, targets, ... are. */
struct chunk {
    int64_t first, M;
    struct nbi_ptr rows, targets, loss, kl, ref_ids, ref_p, kept;
};

static struct chunk chunk_at(const struct loss *x, int64_t first, int64_t limit)
{
    const struct nbi_backward_acts *d = &x->a->d;
    int64_t left = x->l->count - first, at = first * (int64_t)sizeof(float);
    struct nbi_ptr kept = d->kept;
    if (kept.at)
        kept = nbi_ptr_add(kept, first * (int64_t)sizeof(struct nbi_xent_kept));
    return (struct chunk){.first = first,
                          .M = left < limit ? left : limit,
                          .rows = nbi_ptr_add(x->a->rows, at),
                          .targets = nbi_ptr_add(d->targets, at),
                          .loss = nbi_ptr_add(d->loss, at),
                          .kl = nbi_ptr_add(d->kl, at),
                          .ref_ids = nbi_ptr_add(d->ref_ids, at * x->l->ref_k),
                          .ref_p = nbi_ptr_add(d->ref_p, at * x->l->ref_k),
                          .kept = kept};
}

/* logits = final Whead^T, for all rows of the head or some. */
static enum nb_status logits_of(const struct loss *x, int64_t M, struct nbi_ptr final,
                                const struct nbi_weight *head)
{
    return x->w->be->linear(x->s, &(struct nbi_op_linear){.count = 1,
                                                          .y = {x->a->logits},
                                                          .w = {*head},
                                                          .x = final,
                                                          .N = M,
                                                          .K = x->C,
                                                          .matmul = x->p->matmul,
                                                          .bf16 = x->bf16});
}

/* Cross entropy, plus the KL term if the labels have one. The gradient of `final` goes to d.norm.
 */
static enum nb_status cross_entropy(const struct loss *x, const struct chunk *k)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    NBI_TRY(logits_of(x, k->M, a->final, &x->w->head));
    NBI_TRY(be->xent(x->s, &(struct nbi_op_xent){.loss = k->loss,
                                                 .dlogits = x->g ? a->logits : (struct nbi_ptr){0},
                                                 .logits = a->logits,
                                                 .targets = k->targets,
                                                 .scale = x->l->scale,
                                                 .kl = k->kl,
                                                 .ref_ids = k->ref_ids,
                                                 .ref_p = k->ref_p,
                                                 .kl_scale = x->l->kl_scale,
                                                 .kept = k->kept,
                                                 .ref_k = x->l->ref_k,
                                                 .N = k->M,
                                                 .V = x->w->config->vocab_size,
                                                 .bf16 = x->bf16}));
    if (!x->g)
        return NB_OK;
    const struct nbi_ptr dw = x->g->slice_rows > 0 ? (struct nbi_ptr){0} : x->g->head;
    return be->linear_bwd(x->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                            .dx = a->d.norm,
                                                            .dw = {dw},
                                                            .dy = {a->logits},
                                                            .w = {x->w->head},
                                                            .x = a->final,
                                                            .N = k->M,
                                                            .K = x->C,
                                                            .fresh = x->g->fresh && k->first == 0,
                                                            .bf16 = x->bf16});
}

/* Mean absolute difference between `final` and the embedding of the target, which counts as a
 * constant. The gradient of `final` goes to d.norm. */
static enum nb_status embedding_distance(const struct loss *x, const struct chunk *k)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    NBI_TRY(be->embed(x->s, &(struct nbi_op_embed){.x = a->d.target_embed,
                                                   .ids = k->targets,
                                                   .table = x->w->embed,
                                                   .N = k->M,
                                                   .C = x->C,
                                                   .bf16 = x->bf16}));
    return be->l1(x->s, &(struct nbi_op_l1){.loss = k->loss,
                                            .dx = x->g ? a->d.norm : (struct nbi_ptr){0},
                                            .x = a->final,
                                            .target = a->d.target_embed,
                                            .weight = a->d.ones,
                                            .scale = x->l->scale,
                                            .N = k->M,
                                            .C = x->C,
                                            .bf16 = x->bf16});
}

/* Losses of some labels; gradients to the weights and to d.x. */
static enum nb_status loss_of_rows(const struct loss *x, const struct chunk *k)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    /* final = rmsnorm(x of the rows); d.final keeps what went into the norm */
    NBI_TRY(be->gather(
        x->s,
        &(struct nbi_op_gather){
            .y = a->d.final, .x = a->x, .rows = k->rows, .M = k->M, .C = x->C, .bf16 = x->bf16}));
    NBI_TRY(be->rmsnorm(x->s, &(struct nbi_op_rmsnorm){.y = a->final,
                                                       .rstd = a->d.rstd,
                                                       .x = a->d.final,
                                                       .w = x->w->norm,
                                                       .eps = (float)x->w->config->rms_eps,
                                                       .N = k->M,
                                                       .C = x->C,
                                                       .bf16 = x->bf16}));
    NBI_TRY(x->l->kind == NB_LOSS_SCALAR ? embedding_distance(x, k) : cross_entropy(x, k));
    if (!x->g)
        return NB_OK;
    /* rmsnorm_bwd adds to dx. `final` is no longer needed and takes the gradient of its rows. */
    NBI_TRY(be->clear(x->s, a->final, nbi_acts_size(a, k->M * x->C)));
    NBI_TRY(be->rmsnorm_bwd(x->s, &(struct nbi_op_rmsnorm_bwd){.dx = a->final,
                                                               .dw = x->g->norm,
                                                               .dy = a->d.norm,
                                                               .x = a->d.final,
                                                               .rstd = a->d.rstd,
                                                               .w = x->w->norm,
                                                               .N = k->M,
                                                               .C = x->C,
                                                               .bf16 = x->bf16}));
    return be->scatter(
        x->s,
        &(struct nbi_op_scatter){
            .y = a->d.x, .x = a->final, .rows = k->rows, .M = k->M, .C = x->C, .bf16 = x->bf16});
}

/* ---- a whole pass ---- */

static enum nb_status upload_labels(const struct loss *x)
{
    const struct nbi_labels *l = x->l;
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    int64_t ints = l->count * (int64_t)sizeof(int32_t);
    NBI_TRY(be->upload(x->s, a->rows, l->rows, ints));
    NBI_TRY(be->upload(x->s, a->d.targets, l->targets, ints));
    if (l->ref_k > 0) {
        NBI_TRY(be->upload(x->s, a->d.ref_ids, l->ref_ids, ints * l->ref_k));
        NBI_TRY(be->upload(x->s, a->d.ref_p, l->ref_p, ints * l->ref_k));
    }
    if (l->kind != NB_LOSS_SCALAR)
        return NB_OK;
    int64_t M = l->count < a->M ? l->count : a->M;
    for (int64_t i = 0; i < M; i++)
        l->losses[i] = 1;
    return be->upload(x->s, a->d.ones, l->losses, M * (int64_t)sizeof *l->losses);
}

/* Clears gradients that are only added to. The head's is written by its product, if it has one;
 * slices are cleared one by one. */
static enum nb_status clear_gradients(const struct loss *x)
{
    struct nbi_backend *be = x->w->be;
    const struct nbi_grads *g = x->g;
    bool head_written = x->l->kind == NB_LOSS_CE && x->l->count > 0 && g->head.at;
    int64_t table = x->w->config->vocab_size * x->C * (int64_t)sizeof(float);
    NBI_TRY(be->clear(x->s, g->norm, x->C * (int64_t)sizeof(float)));
    if (g->slice_rows > 0)
        return NB_OK;
    if (g->head.at && !head_written)
        NBI_TRY(be->clear(x->s, g->head, table));
    if (g->embed.at && g->embed.at != g->head.at)
        NBI_TRY(be->clear(x->s, g->embed, table));
    return NB_OK;
}

enum nb_status nbi_loss(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                        const struct nbi_pass *p, const struct nbi_labels *l,
                        const struct nbi_grads *g)
{
    int64_t C = w->config->hidden_size, bytes = l->count * (int64_t)sizeof(float);
    const struct loss x = {w, a, s, p, g, l, C, a->dtype == NBI_BF16};
    NBI_BUG_IF(l->count > a->N || l->ref_k > NBI_REF_IDS ||
               (l->ref_k > 0 && l->kind != NB_LOSS_CE));
    NBI_BUG_IF(g && g->slice_rows > 0 && !(a->slices && g->fresh && l->kind == NB_LOSS_CE));
    NBI_TRY(upload_labels(&x));
    if (g)
        NBI_TRY(w->be->clear(s, a->d.x, nbi_acts_size(a, p->N * C)));
    if (g && g->fresh)
        NBI_TRY(clear_gradients(&x));
    for (int64_t i = 0; i < l->count; i += a->M) {
        const struct chunk k = chunk_at(&x, i, a->M);
        NBI_TRY(loss_of_rows(&x, &k));
    }
    NBI_TRY(w->be->download(s, l->losses, a->d.loss, bytes));
    return l->ref_k > 0 ? w->be->download(s, l->kls, a->d.kl, bytes) : NB_OK;
}

/* ---- slices of the vocabulary ---- */

/* Ids [first, first + count). */
struct slice {
    int64_t first, count;
    struct nbi_weight head;
};

/* final of all labels, to d.all_final. */
static enum nb_status final_of_all(const struct loss *x)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    NBI_TRY(be->gather(x->s, &(struct nbi_op_gather){.y = a->d.all_final,
                                                     .x = a->x,
                                                     .rows = a->rows,
                                                     .M = x->l->count,
                                                     .C = x->C,
                                                     .bf16 = x->bf16}));
    return be->rmsnorm(x->s, &(struct nbi_op_rmsnorm){.y = a->d.all_final,
                                                      .x = a->d.all_final,
                                                      .w = x->w->norm,
                                                      .eps = (float)x->w->config->rms_eps,
                                                      .N = x->l->count,
                                                      .C = x->C,
                                                      .bf16 = x->bf16});
}

/* Labels at a time: as many as a->logits has room for, which products on a GPU are fastest with; on
 * the CPU as many as without slices, so that sums keep their order. */
static int64_t labels_at_once(const struct loss *x)
{
    const struct nbi_acts *a = x->a;
    bool most = nbi_backend_has(x->w->be, NBI_CAP_OWN_MEMORY);
    int64_t V = x->w->config->vocab_size, rows = x->g->slice_rows < V ? x->g->slice_rows : V;
    return most ? a->M * V / rows : a->M;
}

/* Adds what some labels give to the head's gradient. */
static enum nb_status slice_of_rows(const struct loss *x, const struct slice *v,
                                    const struct chunk *k)
{
    struct nbi_backend *be = x->w->be;
    struct nbi_acts *a = x->a;
    const struct nbi_ptr final = nbi_ptr_add(a->d.all_final, nbi_acts_size(a, k->first * x->C));
    NBI_TRY(logits_of(x, k->M, final, &v->head));
    NBI_TRY(be->xent_slice(x->s, &(struct nbi_op_xent_slice){.dlogits = a->logits,
                                                             .logits = a->logits,
                                                             .targets = k->targets,
                                                             .kept = k->kept,
                                                             .scale = x->l->scale,
                                                             .ref_ids = k->ref_ids,
                                                             .ref_p = k->ref_p,
                                                             .kl_scale = x->l->kl_scale,
                                                             .ref_k = x->l->ref_k,
                                                             .N = k->M,
                                                             .first = v->first,
                                                             .count = v->count,
                                                             .bf16 = x->bf16}));
    return be->linear_bwd(x->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                            .dw = {x->g->head},
                                                            .dy = {a->logits},
                                                            .w = {v->head},
                                                            .x = final,
                                                            .N = k->M,
                                                            .K = x->C,
                                                            .fresh = k->first == 0,
                                                            .bf16 = x->bf16});
}

static enum nb_status slice_gradients(const struct loss *x, const struct slice *v)
{
    struct nbi_backend *be = x->w->be;
    const struct nbi_grads *g = x->g;
    int64_t bytes = v->count * x->C * (int64_t)sizeof(float), limit = labels_at_once(x);
    if (x->l->count == 0)
        NBI_TRY(be->clear(x->s, g->head, bytes));
    for (int64_t i = 0; i < x->l->count; i += limit) {
        const struct chunk k = chunk_at(x, i, limit);
        NBI_TRY(slice_of_rows(x, v, &k));
    }
    if (g->embed.at != g->head.at)
        NBI_TRY(be->clear(x->s, g->embed, bytes));
    /* x = embed[ids] */
    return be->embed_bwd(x->s, &(struct nbi_op_embed_bwd){.dtable = g->embed,
                                                          .first = v->first,
                                                          .count = v->count,
                                                          .ids = x->a->ids,
                                                          .order = x->a->order,
                                                          .dx = x->a->d.x,
                                                          .N = x->p->N,
                                                          .C = x->C,
                                                          .bf16 = x->bf16});
}

enum nb_status nbi_backward_slices(const struct nbi_weights *w, struct nbi_acts *a,
                                   struct nbi_stream *s, const struct nbi_pass *p,
                                   const struct nbi_labels *l, const struct nbi_grads *g,
                                   const struct nbi_slice_hook *hook)
{
    const struct loss x = {w, a, s, p, g, l, w->config->hidden_size, a->dtype == NBI_BF16};
    int64_t V = w->config->vocab_size, rows = g->slice_rows;
    if (!g->head.at && !g->embed.at)
        return NB_OK;
    NBI_BUG_IF(!g->head.at || !g->embed.at || rows % 32 != 0);
    if (l->count > 0)
        NBI_TRY(final_of_all(&x));
    for (int64_t first = 0; first < V; first += rows) {
        int64_t count = V - first < rows ? V - first : rows;
        const struct slice slice = {first, count, w->be->weight_rows(&w->head, first, count)};
        NBI_TRY(slice_gradients(&x, &slice));
        NBI_TRY(hook->after_slice(hook->ctx, first / rows));
    }
    return NB_OK;
}

/* ---- sums ---- */

struct nbi_loss_sums nbi_loss_sums(const struct nbi_labels *l)
{
    struct nbi_loss_sums sums = {0};
    for (int64_t i = 0; i < l->count; i++) {
        sums.loss += (double)l->losses[i];
        sums.kl += l->ref_k > 0 ? (double)l->kls[i] : 0;
    }
    return sums;
}
