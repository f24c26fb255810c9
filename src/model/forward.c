/* forward.c - the forward pass of Qwen3 as a list of operations, labelled as in docs/MODEL.md.
 *
 * Each operation computes a row from that row alone, and attention from the keys the row sees. So
 * the logits of a token do not depend on how its text was divided into passes. A backend may take
 * the layers and the head of a pass in one call (layers.h), which computes the same equations.
 *
 * Nothing here allocates or waits. Which arguments an operation gets depends only on what execute.c
 * puts into the key of a CUDA graph: the values of the indices are read on the device. */
#include "backend/layers.h"
#include "model/transformer.h"

/* One layer of a pass: weights, activations and sizes. */
struct layer {
    struct nbi_backend *be;
    struct nbi_stream *s;
    const struct nbi_pass *p;
    const struct nbi_acts *a;
    const struct nbi_layer_weights *w;
    const struct nbi_layer_acts *la;
    /* The residual stream before the layer, between its halves and after it: in training arrays of
     * their own, for the backward pass, else all the same. */
    struct nbi_ptr in, mid, out;
    struct nbi_kv_view kv;
    int64_t N, C, F, NH, NKV, D;
    float eps;
    bool bf16;
};

/* The residual stream before layer i, or after the last one. */
static struct nbi_ptr stream_before(const struct nbi_acts *a, int64_t i)
{
    return i < a->layer_count && a->layers[i].in.at ? a->layers[i].in : a->x;
}

static struct layer layer_of(const struct nbi_weights *w, const struct nbi_acts *a,
                             struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    const struct nbi_config *c = w->config;
    const struct nbi_layer_acts *la = &a->layers[layer];
    return (struct layer){.be = w->be,
                          .s = s,
                          .p = p,
                          .a = a,
                          .w = &w->layers[layer],
                          .la = la,
                          .in = stream_before(a, layer),
                          .mid = la->mid.at ? la->mid : a->x,
                          .out = stream_before(a, layer + 1),
                          .kv = p->kv[layer],
                          .N = p->N,
                          .C = c->hidden_size,
                          .F = c->intermediate_size,
                          .NH = c->heads,
                          .NKV = c->kv_heads,
                          .D = c->head_dim,
                          .eps = (float)c->rms_eps,
                          .bf16 = a->dtype == NBI_BF16};
}

/* What a product adds to the residual stream `from` and writes to `to`: none if in place. */
static struct nbi_ptr residual(struct nbi_ptr from, struct nbi_ptr to)
{
    return from.at == to.at ? (struct nbi_ptr){0} : from;
}

/* att = softmax(q_rot k^T / sqrt(D)) v for rows [from, to) of the pass, which see at most max_keys
 * rows each. */
static enum nb_status attention(const struct layer *l, int64_t from, int64_t to, int64_t max_keys,
                                bool kv_unshared)
{
    const struct nbi_pass *p = l->p;
    const struct nbi_acts *a = l->a;
    int64_t ints = from * (int64_t)sizeof(int32_t), heads = from * l->NH * (int64_t)sizeof(float);
    int64_t q = nbi_acts_size(a, from * l->NH * l->D);
    struct nbi_op_attention op = {.y = nbi_ptr_add(l->la->att, q),
                                  .lse = l->la->lse,
                                  .q = nbi_ptr_add(l->la->q_rot, q),
                                  .kv = l->kv,
                                  .first = nbi_ptr_add(a->first, ints),
                                  .last = nbi_ptr_add(a->last, ints),
                                  .pages = a->pages,
                                  .tables = a->tables,
                                  .max_keys = max_keys,
                                  .N = to - from,
                                  .NH = l->NH,
                                  .NKV = l->NKV,
                                  .D = l->D,
                                  .matmul = p->matmul,
                                  .kv_unshared = kv_unshared,
                                  .batch_invariant = p->batch_invariant,
                                  .bf16 = l->bf16};
    if (op.lse.at)
        op.lse = nbi_ptr_add(op.lse, heads);
    if (op.tables.at)
        op.tables = nbi_ptr_add(op.tables, ints);
    return op.N > 0 ? l->be->attention(l->s, &op) : NB_OK;
}

static enum nb_status attention_block(const struct layer *l)
{
    struct nbi_backend *be = l->be;
    const struct nbi_pass *p = l->p;
    const struct nbi_acts *a = l->a;
    const struct nbi_layer_weights *w = l->w;
    const struct nbi_layer_acts *la = l->la;

    /* norm1 = rmsnorm(x, w_input) */
    NBI_TRY(be->rmsnorm(l->s, &(struct nbi_op_rmsnorm){.y = la->norm1,
                                                       .rstd = la->rstd1,
                                                       .x = l->in,
                                                       .w = w->input_norm,
                                                       .eps = l->eps,
                                                       .N = l->N,
                                                       .C = l->C,
                                                       .bf16 = l->bf16}));
    /* q, k, v = norm1 Wq^T, norm1 Wk^T, norm1 Wv^T */
    NBI_TRY(be->linear(l->s, &(struct nbi_op_linear){.count = 3,
                                                     .y = {la->q, la->k, la->v},
                                                     .w = {w->q, w->k, w->v},
                                                     .x = la->norm1,
                                                     .ldy = {la->ld_qkv, la->ld_qkv, la->ld_qkv},
                                                     .N = l->N,
                                                     .K = l->C,
                                                     .matmul = p->matmul,
                                                     .batch_invariant = p->batch_invariant,
                                                     .bf16 = l->bf16}));
    /* q_rot = rope(rmsnorm(q, w_q)); store k: rope(rmsnorm(k, w_k)), v */
    NBI_TRY(be->qkv_rope(l->s, &(struct nbi_op_qkv_rope){.q_out = la->q_rot,
                                                         .kv = l->kv,
                                                         .kv_rows = a->kv_rows,
                                                         .q = la->q,
                                                         .k = la->k,
                                                         .v = la->v,
                                                         .rstd_q = la->rstd_q,
                                                         .rstd_k = la->rstd_k,
                                                         .q_norm = w->q_norm,
                                                         .k_norm = w->k_norm,
                                                         .cos = a->cos,
                                                         .sin = a->sin,
                                                         .eps = l->eps,
                                                         .N = l->N,
                                                         .NH = l->NH,
                                                         .NKV = l->NKV,
                                                         .D = l->D,
                                                         .ld = la->ld_qkv,
                                                         .bf16 = l->bf16}));
    /* att = softmax(q_rot k^T / sqrt(D)) v */
    NBI_TRY(attention(l, 0, p->decode_rows, a->max_keys[0], true));
    NBI_TRY(attention(l, p->decode_rows, l->N, a->max_keys[1], false));
    /* x = x + att Wo^T */
    return be->linear(l->s, &(struct nbi_op_linear){.count = 1,
                                                    .y = {l->mid},
                                                    .w = {w->o},
                                                    .x = la->att,
                                                    .r = residual(l->in, l->mid),
                                                    .N = l->N,
                                                    .K = l->NH * l->D,
                                                    .add = true,
                                                    .matmul = p->matmul,
                                                    .batch_invariant = p->batch_invariant,
                                                    .bf16 = l->bf16});
}

/* The MLP block but for its last product. */
static enum nb_status gate_up_act(const struct layer *l)
{
    struct nbi_backend *be = l->be;
    const struct nbi_layer_acts *la = l->la;
    /* norm2 = rmsnorm(x, w_post) */
    NBI_TRY(be->rmsnorm(l->s, &(struct nbi_op_rmsnorm){.y = la->norm2,
                                                       .rstd = la->rstd2,
                                                       .x = l->mid,
                                                       .w = l->w->post_norm,
                                                       .eps = l->eps,
                                                       .N = l->N,
                                                       .C = l->C,
                                                       .bf16 = l->bf16}));
    /* gate, up = norm2 Wgate^T, norm2 Wup^T */
    NBI_TRY(be->linear(l->s, &(struct nbi_op_linear){.count = 2,
                                                     .y = {la->gate, la->up},
                                                     .w = {l->w->gate, l->w->up},
                                                     .x = la->norm2,
                                                     .ldy = {la->ld_gate, la->ld_gate},
                                                     .N = l->N,
                                                     .K = l->C,
                                                     .matmul = l->p->matmul,
                                                     .batch_invariant = l->p->batch_invariant,
                                                     .bf16 = l->bf16}));
    /* act = silu(gate) * up */
    return be->swiglu(l->s, &(struct nbi_op_swiglu){.y = la->act,
                                                    .gate = la->gate,
                                                    .up = la->up,
                                                    .N = l->N,
                                                    .F = l->F,
                                                    .ld = la->ld_gate,
                                                    .bf16 = l->bf16});
}

static enum nb_status mlp_block(const struct layer *l)
{
    NBI_TRY(gate_up_act(l));
    /* x = x + act Wdown^T */
    return l->be->linear(l->s, &(struct nbi_op_linear){.count = 1,
                                                       .y = {l->out},
                                                       .w = {l->w->down},
                                                       .x = l->la->act,
                                                       .r = residual(l->mid, l->out),
                                                       .N = l->N,
                                                       .K = l->F,
                                                       .add = true,
                                                       .matmul = l->p->matmul,
                                                       .batch_invariant = l->p->batch_invariant,
                                                       .bf16 = l->bf16});
}

static enum nb_status run_layer(const struct layer *l)
{
    NBI_TRY(attention_block(l));
    return mlp_block(l);
}

/* ---- the same in one call ---- */

static bool in_one_call(const struct nbi_weights *w, const struct nbi_pass *p)
{
    return nbi_backend_has(w->be, NBI_CAP_LAYERS) && !p->training;
}

/* Layers [first, first + count), then the logits if `head`. */
static enum nb_status run_layers(const struct nbi_weights *w, const struct nbi_acts *a,
                                 struct nbi_stream *s, const struct nbi_pass *p, int64_t first,
                                 int64_t count, bool head)
{
    const struct nbi_config *c = w->config;
    const struct nbi_layer_acts *la = &a->layers[0];
    struct nbi_op_layers op = {.x = a->x,
                               .w = w->layers + first,
                               .kv = p->kv + first,
                               .count = count,
                               .scratch = {la->norm1, la->norm2, la->q, la->q_rot, la->att, la->k,
                                           la->v, la->gate, la->up, la->act},
                               .cos = a->cos,
                               .sin = a->sin,
                               .kv_rows = a->kv_rows,
                               .first = a->first,
                               .last = a->last,
                               .pages = a->pages,
                               .tables = a->tables,
                               .decode_rows = p->decode_rows,
                               .max_keys = {a->max_keys[0], a->max_keys[1]},
                               .eps = (float)c->rms_eps,
                               .N = p->N,
                               .C = c->hidden_size,
                               .F = c->intermediate_size,
                               .NH = c->heads,
                               .NKV = c->kv_heads,
                               .D = c->head_dim,
                               .matmul = p->matmul,
                               .batch_invariant = p->batch_invariant,
                               .one_row_per_sequence = p->one_row_per_sequence};
    if (head)
        op.head = (struct nbi_head){
            .logits = a->logits, .final = a->final, .norm = w->norm, .w = w->head, .M = p->M};
    if (!nbi_pass_wants_all_rows(p))
        op.head.rows = a->rows;
    return w->be->layers(s, &op);
}

/* ---- passes ---- */

bool nbi_pass_wants_all_rows(const struct nbi_pass *p)
{
    bool all = p->M == p->N;
    for (int64_t i = 0; all && i < p->M; i++)
        all = p->rows[i] == i;
    return all;
}

enum nb_status nbi_forward_head(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *p)
{
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    int64_t M = p->M, C = c->hidden_size;
    const struct nbi_ptr wanted = nbi_pass_wants_all_rows(p) ? a->x : a->final;
    bool bf16 = a->dtype == NBI_BF16;
    if (M == 0)
        return NB_OK;
    if (in_one_call(w, p))
        return run_layers(w, a, s, p, 0, 0, true);
    if (wanted.at != a->x.at)
        NBI_TRY(be->gather(
            s, &(struct nbi_op_gather){
                   .y = wanted, .x = a->x, .rows = a->rows, .M = M, .C = C, .bf16 = bf16}));
    /* logits = rmsnorm(x of the wanted rows, w_final) Whead^T */
    NBI_TRY(be->rmsnorm(s, &(struct nbi_op_rmsnorm){.y = a->final,
                                                    .x = wanted,
                                                    .w = w->norm,
                                                    .eps = (float)c->rms_eps,
                                                    .N = M,
                                                    .C = C,
                                                    .bf16 = bf16}));
    return be->linear(s, &(struct nbi_op_linear){.count = 1,
                                                 .y = {a->logits},
                                                 .w = {w->head},
                                                 .x = a->final,
                                                 .N = M,
                                                 .K = C,
                                                 .matmul = p->matmul,
                                                 .batch_invariant = p->batch_invariant,
                                                 .bf16 = bf16});
}

enum nb_status nbi_forward(const struct nbi_weights *w, const struct nbi_acts *a,
                           struct nbi_stream *s, const struct nbi_pass *p)
{
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    NBI_TRY(be->rope_table(s, &(struct nbi_op_rope_table){.cos = a->cos,
                                                          .sin = a->sin,
                                                          .positions = a->positions,
                                                          .frequency = w->frequency,
                                                          .scale = w->rope_scale,
                                                          .N = p->N,
                                                          .D = c->head_dim}));
    /* x = embed[ids] */
    NBI_TRY(be->embed(s, &(struct nbi_op_embed){.x = stream_before(a, 0),
                                                .ids = a->ids,
                                                .table = w->embed,
                                                .N = p->N,
                                                .C = c->hidden_size,
                                                .bf16 = a->dtype == NBI_BF16}));
    if (in_one_call(w, p) && !p->after_layer)
        return run_layers(w, a, s, p, 0, c->layers, true);
    for (int64_t i = 0; i < c->layers; i++) {
        const struct layer l = layer_of(w, a, s, p, i);
        if (in_one_call(w, p))
            NBI_TRY(run_layers(w, a, s, p, i, 1, false));
        else
            NBI_TRY(run_layer(&l));
        if (p->after_layer)
            NBI_TRY(p->after_layer(p->ctx, i, l.out));
    }
    return nbi_forward_head(w, a, s, p);
}

enum nb_status nbi_forward_layer(const struct nbi_weights *w, const struct nbi_acts *a,
                                 struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    const struct layer l = layer_of(w, a, s, p, layer);
    NBI_TRY(attention_block(&l));
    return gate_up_act(&l); /* the backward pass does not need x + act Wdown^T */
}
