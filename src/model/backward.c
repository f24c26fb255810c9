/* backward.c - the backward pass of Qwen3: forward.c from its end to its beginning. docs/MODEL.md
 * has the equations; d of a quantity is the gradient of the loss. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "model/transformer.h"

/* d.x is the gradient of what the layer gave; becomes that of mid, the stream between its halves.
 */
static enum nb_status mlp_back(const struct nbi_weights *w, const struct nbi_acts *a,
                               struct nbi_stream *s, const struct nbi_layer_grads *g, int64_t layer,
                               int64_t N)
{
    struct nbi_backend *be = w->be;
    const struct nbi_layer_weights *lw = &w->layers[layer];
    const struct nbi_layer_acts *la = &a->layers[layer];
    int64_t C = w->config->hidden_size, F = w->config->intermediate_size;

    /* x = mid + act Wdown^T */
    NBI_TRY(be->linear_bwd(s, &(struct nbi_op_linear_bwd){.count = 1,
                                                          .dx = a->d.act,
                                                          .dw = {g->down},
                                                          .dy = {a->d.x},
                                                          .w = {lw->down},
                                                          .x = la->act,
                                                          .N = N,
                                                          .K = F}));
    /* act = silu(gate) * up; their gradients take their places */
    NBI_TRY(be->swiglu_bwd(s, &(struct nbi_op_swiglu_bwd){.dgate = la->gate,
                                                          .dup = la->up,
                                                          .dy = a->d.act,
                                                          .gate = la->gate,
                                                          .up = la->up,
                                                          .N = N,
                                                          .F = F}));
    /* gate, up = norm2 Wgate^T, norm2 Wup^T */
    NBI_TRY(be->linear_bwd(s, &(struct nbi_op_linear_bwd){.count = 2,
                                                          .dx = a->d.norm,
                                                          .dw = {g->gate, g->up},
                                                          .dy = {la->gate, la->up},
                                                          .w = {lw->gate, lw->up},
                                                          .x = la->norm2,
                                                          .N = N,
                                                          .K = C}));
    /* norm2 = rmsnorm(mid) */
    return be->rmsnorm_bwd(s, &(struct nbi_op_rmsnorm_bwd){.dx = a->d.x,
                                                           .dw = g->post_norm,
                                                           .dy = a->d.norm,
                                                           .x = la->mid,
                                                           .rstd = la->rstd2,
                                                           .w = lw->post_norm,
                                                           .N = N,
                                                           .C = C});
}

/* From mid to in. */
static enum nb_status attention_back(const struct nbi_weights *w, const struct nbi_acts *a,
                                     struct nbi_stream *s, const struct nbi_layer_grads *g,
                                     int64_t layer, int64_t N)
{
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    const struct nbi_layer_weights *lw = &w->layers[layer];
    const struct nbi_layer_acts *la = &a->layers[layer];
    int64_t C = c->hidden_size, NH = c->heads, NKV = c->kv_heads, D = c->head_dim;

    /* mid = in + att Wo^T */
    NBI_TRY(be->linear_bwd(s, &(struct nbi_op_linear_bwd){.count = 1,
                                                          .dx = a->d.att,
                                                          .dw = {g->o},
                                                          .dy = {a->d.x},
                                                          .w = {lw->o},
                                                          .x = la->att,
                                                          .N = N,
                                                          .K = NH * D}));
    /* att = softmax(q_rot k^T / sqrt(D)) v */
    NBI_TRY(be->attention_bwd(s, &(struct nbi_op_attention_bwd){.dq = a->d.q,
                                                                .dk = a->d.k,
                                                                .dv = a->d.v,
                                                                .dy = a->d.att,
                                                                .y = la->att,
                                                                .lse = la->lse,
                                                                .q = la->q_rot,
                                                                .kv = la->kv,
                                                                .first = a->first,
                                                                .N = N,
                                                                .NH = NH,
                                                                .NKV = NKV,
                                                                .D = D}));
    /* q_rot = rope(norm(q)), and so for k */
    NBI_TRY(be->qkv_rope_bwd(s, &(struct nbi_op_qkv_rope_bwd){.dq = a->d.q,
                                                              .dk = a->d.k,
                                                              .dq_norm = g->q_norm,
                                                              .dk_norm = g->k_norm,
                                                              .q = la->q,
                                                              .k = la->k,
                                                              .rstd_q = la->rstd_q,
                                                              .rstd_k = la->rstd_k,
                                                              .q_norm = lw->q_norm,
                                                              .k_norm = lw->k_norm,
                                                              .cos = a->cos,
                                                              .sin = a->sin,
                                                              .N = N,
                                                              .NH = NH,
                                                              .NKV = NKV,
                                                              .D = D}));
    /* q, k, v = norm1 Wq^T, norm1 Wk^T, norm1 Wv^T */
    NBI_TRY(be->linear_bwd(s, &(struct nbi_op_linear_bwd){.count = 3,
                                                          .dx = a->d.norm,
                                                          .dw = {g->q, g->k, g->v},
                                                          .dy = {a->d.q, a->d.k, a->d.v},
                                                          .w = {lw->q, lw->k, lw->v},
                                                          .x = la->norm1,
                                                          .N = N,
                                                          .K = C}));
    /* norm1 = rmsnorm(in) */
    return be->rmsnorm_bwd(s, &(struct nbi_op_rmsnorm_bwd){.dx = a->d.x,
                                                           .dw = g->input_norm,
                                                           .dy = a->d.norm,
                                                           .x = la->in,
                                                           .rstd = la->rstd1,
                                                           .w = lw->input_norm,
                                                           .N = N,
                                                           .C = C});
}

enum nb_status nbi_backward(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                            const struct nbi_pass *p, const struct nbi_grads *g,
                            const struct nbi_backward_hook *hook)
{
    for (int64_t layer = w->config->layers - 1; layer >= g->first_layer; layer--) {
        if (a->recompute)
            NBI_TRY(nbi_forward_layer(w, a, s, p, layer));
        NBI_TRY(mlp_back(w, a, s, &g->layers[layer], layer, p->N));
        NBI_TRY(attention_back(w, a, s, &g->layers[layer], layer, p->N));
        if (hook)
            NBI_TRY(hook->after_layer(hook->ctx, layer));
    }
    if (!g->embed.at || g->first_layer > 0)
        return NB_OK;
    return w->be->embed_bwd(s, &(struct nbi_op_embed_bwd){.dtable = g->embed,
                                                          .ids = a->ids,
                                                          .dx = a->d.x,
                                                          .N = p->N,
                                                          .C = w->config->hidden_size});
}

/* ---- the head ---- */

struct head {
    const struct nbi_weights *w;
    struct nbi_acts *a;
    struct nbi_stream *s;
    const struct nbi_grads *g;
    const struct nbi_labels *l;
};

/* Losses of M rows of logits, and the gradient of final in d.norm, which has room: M <= N. */
static enum nb_status cross_entropy(const struct head *h, int64_t first, int64_t M)
{
    struct nbi_backend *be = h->w->be;
    struct nbi_acts *a = h->a;
    const struct nbi_labels *l = h->l;
    int64_t C = h->w->config->hidden_size, J = l->ref_k, base = M * J * (int64_t)sizeof(float);
    NBI_TRY(be->linear(h->s, &(struct nbi_op_linear){.count = 1,
                                                     .y = {a->logits},
                                                     .w = {h->w->head},
                                                     .x = a->final,
                                                     .N = M,
                                                     .K = C,
                                                     .exact = true}));
    if (J > 0) {
        NBI_TRY(be->upload(h->s, a->d.ref_ids, l->ref_ids + first * J, base));
        NBI_TRY(be->upload(h->s, a->d.ref_p, l->ref_p + first * J, base));
    }
    NBI_TRY(be->xent(h->s, &(struct nbi_op_xent){.loss = a->d.loss,
                                                 .dlogits = h->g ? a->logits : (struct nbi_ptr){0},
                                                 .logits = a->logits,
                                                 .targets = a->d.targets,
                                                 .scale = l->scale,
                                                 .kl = a->d.kl,
                                                 .ref_ids = a->d.ref_ids,
                                                 .ref_p = a->d.ref_p,
                                                 .kl_scale = l->kl_scale,
                                                 .ref_k = J,
                                                 .N = M,
                                                 .V = h->w->config->vocab_size}));
    if (!h->g)
        return NB_OK;
    /* logits = final Whead^T */
    return be->linear_bwd(h->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                            .dx = a->d.norm,
                                                            .dw = {h->g->head},
                                                            .dy = {a->logits},
                                                            .w = {h->w->head},
                                                            .x = a->final,
                                                            .N = M,
                                                            .K = C});
}

/* The same for the distance to the embeddings of the targets. */
static enum nb_status distance(const struct head *h, int64_t M)
{
    struct nbi_backend *be = h->w->be;
    struct nbi_acts *a = h->a;
    int64_t C = h->w->config->hidden_size;
    NBI_TRY(be->embed(
        h->s, &(struct nbi_op_embed){
                  .x = a->d.wanted, .ids = a->d.targets, .table = h->w->embed, .N = M, .C = C}));
    return be->l1(h->s, &(struct nbi_op_l1){.loss = a->d.loss,
                                            .dx = h->g ? a->d.norm : (struct nbi_ptr){0},
                                            .x = a->final,
                                            .target = a->d.wanted,
                                            .weight = a->d.ones,
                                            .scale = h->l->scale,
                                            .N = M,
                                            .C = C});
}

/* Losses of rows [first, first + M) of the labels into a->d.loss; gradients if wanted. */
static enum nb_status some_rows(const struct head *h, int64_t first, int64_t M)
{
    struct nbi_backend *be = h->w->be;
    struct nbi_acts *a = h->a;
    const struct nbi_labels *l = h->l;
    int64_t C = h->w->config->hidden_size, ints = M * (int64_t)sizeof(int32_t);
    NBI_TRY(be->upload(h->s, a->rows, l->rows + first, ints));
    NBI_TRY(be->upload(h->s, a->d.targets, l->targets + first, ints));
    NBI_TRY(be->gather(h->s, &(struct nbi_op_gather){
                                 .y = a->d.final, .x = a->x, .rows = a->rows, .M = M, .C = C}));
    NBI_TRY(be->rmsnorm(h->s, &(struct nbi_op_rmsnorm){.y = a->final,
                                                       .rstd = a->d.rstd,
                                                       .x = a->d.final,
                                                       .w = h->w->norm,
                                                       .eps = (float)h->w->config->rms_eps,
                                                       .N = M,
                                                       .C = C}));
    NBI_TRY(l->kind == NBI_LOSS_SCALAR ? distance(h, M) : cross_entropy(h, first, M));
    if (!h->g)
        return NB_OK;
    /* final = rmsnorm(x of the rows), which is in d.final; its gradient goes to final, then home */
    NBI_TRY(be->clear(h->s, a->final, M * C * (int64_t)sizeof(float)));
    NBI_TRY(be->rmsnorm_bwd(h->s, &(struct nbi_op_rmsnorm_bwd){.dx = a->final,
                                                               .dw = h->g->norm,
                                                               .dy = a->d.norm,
                                                               .x = a->d.final,
                                                               .rstd = a->d.rstd,
                                                               .w = h->w->norm,
                                                               .N = M,
                                                               .C = C}));
    return be->scatter(h->s, &(struct nbi_op_scatter){
                                 .y = a->d.x, .x = a->final, .rows = a->rows, .M = M, .C = C});
}

/* Adds M results of the device to *sum, in order. */
static enum nb_status add_up(const struct head *h, struct nbi_ptr from, float *room, int64_t M,
                             double *sum)
{
    NBI_TRY(h->w->be->download(h->s, room, from, M * (int64_t)sizeof *room));
    NBI_TRY(h->w->be->sync(h->s));
    for (int64_t i = 0; i < M; i++)
        *sum += (double)room[i];
    return NB_OK;
}

static enum nb_status all_rows(const struct head *h, struct nbi_labels *l)
{
    struct nbi_acts *a = h->a;
    float *room = l->scratch;
    for (int64_t i = 0; i < a->M; i++)
        room[i] = 1;
    if (l->kind == NBI_LOSS_SCALAR)
        NBI_TRY(h->w->be->upload(h->s, a->d.ones, room, a->M * (int64_t)sizeof *room));
    for (int64_t i = 0; i < l->count; i += a->M) {
        int64_t M = l->count - i < a->M ? l->count - i : a->M;
        NBI_TRY(some_rows(h, i, M));
        NBI_TRY(add_up(h, a->d.loss, room, M, &l->loss));
        if (l->ref_k > 0)
            NBI_TRY(add_up(h, a->d.kl, room, M, &l->kl));
    }
    return NB_OK;
}

enum nb_status nbi_loss(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                        const struct nbi_pass *p, struct nbi_labels *l, const struct nbi_grads *g)
{
    const struct head h = {w, a, s, g, l};
    NBI_BUG_IF(l->ref_k > NBI_REF_IDS || (l->ref_k > 0 && l->kind != NBI_LOSS_CE));
    l->loss = l->kl = 0;
    if (g)
        NBI_TRY(w->be->clear(s, a->d.x, p->N * w->config->hidden_size * (int64_t)sizeof(float)));
    return all_rows(&h, l);
}
