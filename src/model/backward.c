/* backward.c - the backward pass of Qwen3: the operations of forward.c from last to first.
 *
 * Each block is labelled with the equation of docs/MODEL.md that it differentiates; d of a quantity
 * is the gradient of the loss with respect to it. Throughout, d.x is the gradient of the residual
 * stream. loss.c leaves that of the last layer's output there. Each half of a layer is a residual
 * branch, so its gradient is added to d.x. */
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "model/transformer.h"

/* One layer of a backward pass: gradients, weights, activations and sizes. */
struct layer {
    struct nbi_backend *be;
    struct nbi_stream *s;
    const struct nbi_layer_grads *g;
    const struct nbi_layer_weights *w;
    const struct nbi_acts *a;
    const struct nbi_layer_acts *la;
    const struct nbi_backward_acts *d;
    int64_t N, C, F, NH, NKV, D;
    bool bf16, fresh, dw_bf16;
};

static struct layer layer_of(const struct nbi_weights *w, const struct nbi_acts *a,
                             struct nbi_stream *s, const struct nbi_grads *g, int64_t N,
                             int64_t layer)
{
    const struct nbi_config *c = w->config;
    return (struct layer){.be = w->be,
                          .s = s,
                          .g = &g->layers[layer],
                          .w = &w->layers[layer],
                          .a = a,
                          .la = &a->layers[layer],
                          .d = &a->d,
                          .N = N,
                          .C = c->hidden_size,
                          .F = c->intermediate_size,
                          .NH = c->heads,
                          .NKV = c->kv_heads,
                          .D = c->head_dim,
                          .bf16 = a->dtype == NBI_BF16,
                          .fresh = g->fresh,
                          .dw_bf16 = g->bf16};
}

/* Gradients of vectors are only ever added to. */
static enum nb_status clear_vectors(const struct layer *l)
{
    const struct nbi_layer_grads *g = l->g;
    const struct {
        struct nbi_ptr at;
        int64_t n;
    } all[] = {{g->input_norm, l->C}, {g->post_norm, l->C}, {g->q_norm, l->D}, {g->k_norm, l->D}};
    for (int i = 0; i < 4; i++)
        NBI_TRY(l->be->clear(l->s, all[i].at, all[i].n * (int64_t)sizeof(float)));
    return NB_OK;
}

/* From the layer's output to mid, the residual stream between its halves. */
static enum nb_status mlp_backward(const struct layer *l)
{
    struct nbi_backend *be = l->be;
    const struct nbi_layer_weights *w = l->w;
    const struct nbi_layer_acts *la = l->la;

    /* x = mid + act Wdown^T */
    NBI_TRY(be->linear_bwd(l->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                             .dx = l->d->act,
                                                             .dw = {l->g->down},
                                                             .dy = {l->d->x},
                                                             .w = {w->down},
                                                             .x = la->act,
                                                             .N = l->N,
                                                             .K = l->F,
                                                             .fresh = l->fresh,
                                                             .bf16 = l->bf16,
                                                             .dw_bf16 = l->dw_bf16}));
    /* act = silu(gate) * up; dgate and dup overwrite gate and up */
    NBI_TRY(be->swiglu_bwd(l->s, &(struct nbi_op_swiglu_bwd){.dgate = la->gate,
                                                             .dup = la->up,
                                                             .dy = l->d->act,
                                                             .gate = la->gate,
                                                             .up = la->up,
                                                             .N = l->N,
                                                             .F = l->F,
                                                             .ld = la->ld_gate,
                                                             .bf16 = l->bf16}));
    /* gate, up = norm2 Wgate^T, norm2 Wup^T */
    NBI_TRY(be->linear_bwd(l->s, &(struct nbi_op_linear_bwd){.count = 2,
                                                             .dx = l->d->norm,
                                                             .dw = {l->g->gate, l->g->up},
                                                             .dy = {la->gate, la->up},
                                                             .w = {w->gate, w->up},
                                                             .x = la->norm2,
                                                             .ldy = {la->ld_gate, la->ld_gate},
                                                             .N = l->N,
                                                             .K = l->C,
                                                             .fresh = l->fresh,
                                                             .bf16 = l->bf16,
                                                             .dw_bf16 = l->dw_bf16}));
    /* norm2 = rmsnorm(mid, w_post) */
    return be->rmsnorm_bwd(l->s, &(struct nbi_op_rmsnorm_bwd){.dx = l->d->x,
                                                              .dw = l->g->post_norm,
                                                              .dy = l->d->norm,
                                                              .x = la->mid,
                                                              .rstd = la->rstd2,
                                                              .w = w->post_norm,
                                                              .N = l->N,
                                                              .C = l->C,
                                                              .bf16 = l->bf16});
}

/* From mid to in, the layer's input. */
static enum nb_status attention_backward(const struct layer *l)
{
    struct nbi_backend *be = l->be;
    const struct nbi_layer_weights *w = l->w;
    const struct nbi_layer_acts *la = l->la;
    const struct nbi_backward_acts *d = l->d;
    int64_t ld = la->ld_qkv;

    /* mid = in + att Wo^T */
    NBI_TRY(be->linear_bwd(l->s, &(struct nbi_op_linear_bwd){.count = 1,
                                                             .dx = d->att,
                                                             .dw = {l->g->o},
                                                             .dy = {d->x},
                                                             .w = {w->o},
                                                             .x = la->att,
                                                             .N = l->N,
                                                             .K = l->NH * l->D,
                                                             .fresh = l->fresh,
                                                             .bf16 = l->bf16,
                                                             .dw_bf16 = l->dw_bf16}));
    /* att = softmax(q_rot k^T / sqrt(D)) v */
    NBI_TRY(be->attention_bwd(l->s, &(struct nbi_op_attention_bwd){.dq = d->q,
                                                                   .dk = d->k,
                                                                   .dv = d->v,
                                                                   .dy = d->att,
                                                                   .y = la->att,
                                                                   .lse = la->lse,
                                                                   .q = la->q_rot,
                                                                   .kv = la->kv,
                                                                   .first = l->a->first,
                                                                   .end = l->a->end,
                                                                   .N = l->N,
                                                                   .NH = l->NH,
                                                                   .NKV = l->NKV,
                                                                   .D = l->D,
                                                                   .ld = la->ld_qkv,
                                                                   .bf16 = l->bf16}));
    /* q_rot = rope(rmsnorm(q, w_q)), and the same for k */
    NBI_TRY(be->qkv_rope_bwd(l->s, &(struct nbi_op_qkv_rope_bwd){.dq = d->q,
                                                                 .dk = d->k,
                                                                 .dq_norm = l->g->q_norm,
                                                                 .dk_norm = l->g->k_norm,
                                                                 .q = la->q,
                                                                 .k = la->k,
                                                                 .rstd_q = la->rstd_q,
                                                                 .rstd_k = la->rstd_k,
                                                                 .q_norm = w->q_norm,
                                                                 .k_norm = w->k_norm,
                                                                 .cos = l->a->cos,
                                                                 .sin = l->a->sin,
                                                                 .N = l->N,
                                                                 .NH = l->NH,
                                                                 .NKV = l->NKV,
                                                                 .D = l->D,
                                                                 .ld = la->ld_qkv,
                                                                 .bf16 = l->bf16}));
    /* q, k, v = norm1 Wq^T, norm1 Wk^T, norm1 Wv^T */
    NBI_TRY(be->linear_bwd(l->s, &(struct nbi_op_linear_bwd){.count = 3,
                                                             .dx = d->norm,
                                                             .dw = {l->g->q, l->g->k, l->g->v},
                                                             .dy = {d->q, d->k, d->v},
                                                             .w = {w->q, w->k, w->v},
                                                             .x = la->norm1,
                                                             .ldy = {ld, ld, ld},
                                                             .N = l->N,
                                                             .K = l->C,
                                                             .fresh = l->fresh,
                                                             .bf16 = l->bf16,
                                                             .dw_bf16 = l->dw_bf16}));
    /* norm1 = rmsnorm(in, w_input) */
    return be->rmsnorm_bwd(l->s, &(struct nbi_op_rmsnorm_bwd){.dx = d->x,
                                                              .dw = l->g->input_norm,
                                                              .dy = d->norm,
                                                              .x = la->in,
                                                              .rstd = la->rstd1,
                                                              .w = w->input_norm,
                                                              .N = l->N,
                                                              .C = l->C,
                                                              .bf16 = l->bf16});
}

enum nb_status nbi_backward(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                            const struct nbi_pass *p, const struct nbi_grads *g,
                            const struct nbi_backward_hook *hook)
{
    for (int64_t i = w->config->layers - 1; i >= g->first_layer; i--) {
        const struct layer l = layer_of(w, a, s, g, p->N, i);
        if (a->recompute)
            NBI_TRY(nbi_forward_layer(w, a, s, p, i));
        if (g->fresh)
            NBI_TRY(clear_vectors(&l));
        NBI_TRY(mlp_backward(&l));
        NBI_TRY(attention_backward(&l));
        if (hook)
            NBI_TRY(hook->after_layer(hook->ctx, i));
    }
    if (!g->embed.at || g->first_layer > 0 || g->slice_rows > 0)
        return NB_OK;
    /* x = embed[ids] */
    return w->be->embed_bwd(s, &(struct nbi_op_embed_bwd){.dtable = g->embed,
                                                          .ids = a->ids,
                                                          .order = a->order,
                                                          .dx = a->d.x,
                                                          .N = p->N,
                                                          .C = w->config->hidden_size,
                                                          .bf16 = a->dtype == NBI_BF16});
}
