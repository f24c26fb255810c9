/* forward.c - the forward pass of Qwen3, as a list of operations. docs/MODEL.md has the equations
 * under the same labels. */
#include <string.h>

#include "backend/decode.h"
#include "model/transformer.h"

/* As many rows of the store as a token of [from, to) sees, or up to twice that: a power of two, so
 * that passes stay the same while sequences grow. */
static int64_t longest(const struct nbi_pass *p, int64_t from, int64_t to)
{
    int64_t most = from < to ? 128 : 0;
    for (int64_t n = from; n < to; n++)
        while (p->last[n] - p->first[n] >= most)
            most *= 2;
    return most;
}

static void pack(struct nbi_acts *a, struct nbi_ptr *place, const int32_t *from, int64_t count,
                 int64_t at)
{
    *place = nbi_ptr_add(a->indices, at * (int64_t)sizeof *from);
    if (count > 0)
        memcpy(a->packed + at, from, (size_t)count * sizeof *from);
}

/* All that a pass says of its tokens, in one copy. Where things are depends on N, and on how much
 * room there is for rows and pages. */
static enum nb_status upload_indices(struct nbi_acts *a, struct nbi_stream *s,
                                     const struct nbi_pass *p)
{
    int64_t N = p->N, at = 5 * N, end;
    pack(a, &a->ids, p->ids, N, 0);
    pack(a, &a->positions, p->positions, N, N);
    pack(a, &a->kv_rows, p->kv_rows, N, 2 * N);
    pack(a, &a->first, p->first, N, 3 * N);
    pack(a, &a->last, p->last, N, 4 * N);
    a->tables = a->pages = (struct nbi_ptr){0};
    if (p->pages) {
        pack(a, &a->tables, p->tables, N, at);
        at += N;
    }
    pack(a, &a->rows, p->rows, p->M, at);
    end = at + p->M;
    if (p->pages) {
        pack(a, &a->pages, p->pages, p->page_count, at + a->M);
        end = at + a->M + p->page_count;
    }
    a->max_keys[0] = longest(p, 0, p->decode_rows);
    a->max_keys[1] = longest(p, p->decode_rows, N);
    return a->be->upload(s, a->indices, a->packed, end * (int64_t)sizeof *a->packed);
}

/* att = softmax(q_rot k^T / sqrt(D)) v, of those tokens that are apart or of the others. */
static enum nb_status attend(const struct nbi_weights *w, const struct nbi_acts *a,
                             struct nbi_stream *s, const struct nbi_pass *p, int64_t layer,
                             bool apart)
{
    const struct nbi_config *c = w->config;
    const struct nbi_layer_acts *la = &a->layers[layer];
    int64_t from = apart ? 0 : p->decode_rows, NH = c->heads;
    int64_t ints = from * (int64_t)sizeof(int32_t), heads = from * NH * (int64_t)sizeof(float);
    struct nbi_op_attention op = {.y = nbi_ptr_add(la->att, heads * c->head_dim),
                                  .lse = la->lse,
                                  .q = nbi_ptr_add(la->q_rot, heads * c->head_dim),
                                  .kv = p->kv[layer],
                                  .first = nbi_ptr_add(a->first, ints),
                                  .last = nbi_ptr_add(a->last, ints),
                                  .pages = a->pages,
                                  .tables = a->tables,
                                  .max_keys = a->max_keys[apart ? 0 : 1],
                                  .N = apart ? p->decode_rows : p->N - p->decode_rows,
                                  .NH = NH,
                                  .NKV = c->kv_heads,
                                  .D = c->head_dim,
                                  .exact = p->exact,
                                  .kv_unshared = apart,
                                  .one_row_per_sequence = p->one_row_per_sequence,
                                  .batch_invariant = p->batch_invariant};
    if (op.lse.at)
        op.lse = nbi_ptr_add(op.lse, heads);
    if (op.tables.at)
        op.tables = nbi_ptr_add(op.tables, ints);
    return op.N > 0 ? w->be->attention(s, &op) : NB_OK;
}

/* The product of a norm. Only the backward pass wants what is in between. */
static enum nb_status norm_linear(const struct nbi_acts *a, struct nbi_stream *s,
                                  const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *product)
{
    if (a->be->norm_linear && !a->d.x.at)
        return a->be->norm_linear(s, norm, product);
    NBI_TRY(a->be->rmsnorm(s, norm));
    return a->be->linear(s, product);
}

static enum nb_status attention_block(const struct nbi_weights *w, const struct nbi_acts *a,
                                      struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    const struct nbi_layer_weights *lw = &w->layers[layer];
    const struct nbi_layer_acts *la = &a->layers[layer];
    int64_t N = p->N, C = c->hidden_size, NH = c->heads, NKV = c->kv_heads, D = c->head_dim;
    float eps = (float)c->rms_eps;

    if (la->in.at)
        NBI_TRY(be->copy(s, la->in, a->x, N * C * (int64_t)sizeof(float)));
    /* norm1 = rmsnorm(x); q, k, v = norm1 Wq^T, norm1 Wk^T, norm1 Wv^T */
    NBI_TRY(norm_linear(a, s,
                        &(struct nbi_op_rmsnorm){.y = la->norm1,
                                                 .rstd = la->rstd1,
                                                 .x = a->x,
                                                 .w = lw->input_norm,
                                                 .eps = eps,
                                                 .N = N,
                                                 .C = C},
                        &(struct nbi_op_linear){.count = 3,
                                                .y = {la->q, la->k, la->v},
                                                .w = {lw->q, lw->k, lw->v},
                                                .x = la->norm1,
                                                .N = N,
                                                .K = C,
                                                .exact = p->exact,
                                                .batch_invariant = p->batch_invariant}));
    /* q_rot = rope(norm(q)); store: rope(norm(k)), v */
    NBI_TRY(be->qkv_rope(s, &(struct nbi_op_qkv_rope){.q_out = la->q_rot,
                                                      .kv = p->kv[layer],
                                                      .kv_rows = a->kv_rows,
                                                      .q = la->q,
                                                      .k = la->k,
                                                      .v = la->v,
                                                      .rstd_q = la->rstd_q,
                                                      .rstd_k = la->rstd_k,
                                                      .q_norm = lw->q_norm,
                                                      .k_norm = lw->k_norm,
                                                      .cos = a->cos,
                                                      .sin = a->sin,
                                                      .eps = eps,
                                                      .N = N,
                                                      .NH = NH,
                                                      .NKV = NKV,
                                                      .D = D}));
    /* att = softmax(q_rot k^T / sqrt(D)) v */
    NBI_TRY(attend(w, a, s, p, layer, true));
    NBI_TRY(attend(w, a, s, p, layer, false));
    /* x = x + att Wo^T */
    return be->linear(s, &(struct nbi_op_linear){.count = 1,
                                                 .y = {a->x},
                                                 .w = {lw->o},
                                                 .x = la->att,
                                                 .N = N,
                                                 .K = NH * D,
                                                 .add = true,
                                                 .exact = p->exact,
                                                 .batch_invariant = p->batch_invariant});
}

static enum nb_status gate_and_up(const struct nbi_weights *w, const struct nbi_acts *a,
                                  struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    const struct nbi_config *c = w->config;
    const struct nbi_layer_weights *lw = &w->layers[layer];
    const struct nbi_layer_acts *la = &a->layers[layer];
    int64_t N = p->N, C = c->hidden_size;
    struct nbi_ptr act = {0};

    if (lw->down.dtype == lw->gate.dtype && lw->down.dtype == lw->up.dtype)
        act = la->act;
    if (la->mid.at)
        NBI_TRY(w->be->copy(s, la->mid, a->x, N * C * (int64_t)sizeof(float)));
    /* norm2 = rmsnorm(x); gate, up = norm2 Wgate^T, norm2 Wup^T */
    return norm_linear(a, s,
                       &(struct nbi_op_rmsnorm){.y = la->norm2,
                                                .rstd = la->rstd2,
                                                .x = a->x,
                                                .w = lw->post_norm,
                                                .eps = (float)c->rms_eps,
                                                .N = N,
                                                .C = C},
                       &(struct nbi_op_linear){.count = 2,
                                               .y = {la->gate, la->up},
                                               .w = {lw->gate, lw->up},
                                               .x = la->norm2,
                                               .act = act,
                                               .N = N,
                                               .K = C,
                                               .exact = p->exact,
                                               .batch_invariant = p->batch_invariant});
}

/* act = silu(gate) * up */
static struct nbi_op_swiglu act_of(const struct nbi_weights *w, const struct nbi_layer_acts *la,
                                   int64_t N)
{
    return (struct nbi_op_swiglu){
        .y = la->act, .gate = la->gate, .up = la->up, .N = N, .F = w->config->intermediate_size};
}

static enum nb_status mlp_block(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    struct nbi_backend *be = w->be;
    const struct nbi_layer_acts *la = &a->layers[layer];
    const struct nbi_op_swiglu act = act_of(w, la, p->N);
    /* x = x + act Wdown^T */
    const struct nbi_op_linear down = {.count = 1,
                                       .y = {a->x},
                                       .w = {w->layers[layer].down},
                                       .x = la->act,
                                       .N = p->N,
                                       .K = w->config->intermediate_size,
                                       .add = true,
                                       .exact = p->exact,
                                       .batch_invariant = p->batch_invariant};
    NBI_TRY(gate_and_up(w, a, s, p, layer));
    if (be->swiglu_linear && !a->d.x.at)
        return be->swiglu_linear(s, &act, &down);
    NBI_TRY(be->swiglu(s, &act));
    return be->linear(s, &down);
}

enum nb_status nbi_forward_layer(const struct nbi_weights *w, const struct nbi_acts *a,
                                 struct nbi_stream *s, const struct nbi_pass *p, int64_t layer)
{
    int64_t bytes = p->N * w->config->hidden_size * (int64_t)sizeof(float);
    NBI_TRY(w->be->copy(s, a->x, a->layers[layer].in, bytes));
    NBI_TRY(attention_block(w, a, s, p, layer));
    NBI_TRY(gate_and_up(w, a, s, p, layer));
    const struct nbi_op_swiglu act = act_of(w, &a->layers[layer], p->N);
    return w->be->swiglu(s, &act); /* all but the MLP's last product */
}

/* All rows are wanted, in order. */
static bool wants_all(const struct nbi_pass *p)
{
    bool all = p->M == p->N;
    for (int64_t i = 0; all && i < p->M; i++)
        all = p->rows[i] == i;
    return all;
}

/* logits = rmsnorm(x of the wanted rows) Whead^T */
static enum nb_status head(const struct nbi_weights *w, const struct nbi_acts *a,
                           struct nbi_stream *s, const struct nbi_pass *p)
{
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    int64_t M = p->M, C = c->hidden_size;
    const struct nbi_ptr wanted = wants_all(p) ? a->x : a->final;
    if (M == 0)
        return NB_OK;
    if (wanted.at != a->x.at)
        NBI_TRY(be->gather(
            s, &(struct nbi_op_gather){.y = wanted, .x = a->x, .rows = a->rows, .M = M, .C = C}));
    return norm_linear(
        a, s,
        &(struct nbi_op_rmsnorm){
            .y = a->final, .x = wanted, .w = w->norm, .eps = (float)c->rms_eps, .N = M, .C = C},
        &(struct nbi_op_linear){.count = 1,
                                .y = {a->logits},
                                .w = {w->head},
                                .x = a->final,
                                .N = M,
                                .K = C,
                                .exact = p->exact,
                                .batch_invariant = p->batch_invariant});
}

enum nb_status nbi_execute_head(const struct nbi_weights *w, struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *p)
{
    NBI_BUG_IF(p->M > a->M);
    NBI_TRY(w->be->upload(s, a->rows, p->rows, p->M * (int64_t)sizeof(int32_t)));
    return head(w, a, s, p);
}

/* A pass whose indices are on the device. */
struct work {
    const struct nbi_weights *w;
    const struct nbi_acts *a;
    struct nbi_stream *s;
    const struct nbi_pass *p;
};

/* All operations of a pass. What they are given depends on the key alone. */
static enum nb_status all_layers(void *ctx)
{
    const struct work *work = ctx;
    const struct nbi_weights *w = work->w;
    const struct nbi_acts *a = work->a;
    const struct nbi_pass *p = work->p;
    struct nbi_stream *s = work->s;
    struct nbi_backend *be = w->be;
    const struct nbi_config *c = w->config;
    NBI_TRY(be->rope_table(s, &(struct nbi_op_rope_table){.cos = a->cos,
                                                          .sin = a->sin,
                                                          .positions = a->positions,
                                                          .frequency = w->frequency,
                                                          .scale = w->rope_scale,
                                                          .N = p->N,
                                                          .D = c->head_dim}));
    NBI_TRY(be->embed(
        s, &(struct nbi_op_embed){
               .x = a->x, .ids = a->ids, .table = w->embed, .N = p->N, .C = c->hidden_size}));
    for (int64_t layer = 0; layer < c->layers; layer++) {
        NBI_TRY(attention_block(w, a, s, p, layer));
        NBI_TRY(mlp_block(w, a, s, p, layer));
        if (p->after_layer)
            NBI_TRY(p->after_layer(p->ctx, layer, a->x));
    }
    return head(w, a, s, p);
}

/* The key of a pass. Whoever gives other weights, activations or stores gives them other
 * addresses; where the indices are depends on N and on whether there are pages. */
static struct nbi_graph routine_for(struct work *work)
{
    const struct nbi_acts *a = work->a;
    const struct nbi_pass *p = work->p;
    return (struct nbi_graph){
        .key = {p->N, p->M, p->decode_rows, a->max_keys[0], a->max_keys[1], p->exact,
                p->batch_invariant + 2 * p->one_row_per_sequence + 4 * wants_all(p),
                p->pages != NULL, (int64_t)(uintptr_t)work->w->layers, (int64_t)a->block.at,
                (int64_t)p->kv[0].k.at, p->kv[0].dtype},
        .queue = all_layers,
        .ctx = work};
}

/* A pass that may come again as it is: a step of decoding. Weights that are trained change. */
static bool repeats(const struct nbi_backend *be, const struct nbi_acts *a,
                    const struct nbi_pass *p)
{
    return be->graph_run && p->N <= be->graph_rows && !p->after_layer && !a->d.x.at;
}

/* Whether the backend has a way of its own for the pass. */
static bool is_single(const struct nbi_acts *a, const struct nbi_pass *p)
{
    return a->megakernel && p->N == 1 && !p->exact && !p->after_layer && !p->pages;
}

static struct nbi_megakernel_step step_of(const struct nbi_acts *a, const struct nbi_pass *p,
                                          int32_t id)
{
    return (struct nbi_megakernel_step){.id = id,
                                        .position = p->positions[0],
                                        .kv_row = p->kv_rows[0],
                                        .first = p->first[0],
                                        .last = p->last[0],
                                        .logits = a->logits};
}

enum nb_status nbi_execute(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                           const struct nbi_pass *p)
{
    struct nbi_backend *be = w->be;
    struct work work = {w, a, s, p};
    NBI_BUG_IF(p->N > a->N || p->M > a->M || p->decode_rows > p->N);
    NBI_BUG_IF(p->pages && p->page_count > a->page_count);
    if (is_single(a, p)) {
        const struct nbi_megakernel_step step = step_of(a, p, p->ids[0]);
        return be->megakernel_run(a->megakernel, &step);
    }
    NBI_TRY(upload_indices(a, s, p));
    if (!repeats(be, a, p))
        return all_layers(&work);
    const struct nbi_graph routine = routine_for(&work);
    return be->graph_run(s, &routine);
}

bool nbi_execute_can_run_ahead(const struct nbi_acts *a, const struct nbi_pass *p)
{
    return is_single(a, p) && a->be->megakernel_run_ahead;
}

enum nb_status nbi_execute_run_ahead(const struct nbi_weights *w, const struct nbi_acts *a,
                                     struct nbi_stream *s, const struct nbi_pass *p,
                                     struct nbi_run_ahead *f)
{
    NBI_BUG_IF(!nbi_execute_can_run_ahead(a, p));
    const struct nbi_megakernel_step step = step_of(a, p, 0);
    if (f->k > 1)
        NBI_TRY(nbi_execute_topk(w, a, s, 1, f->k));
    f->topk = a->topk;
    return a->be->megakernel_run_ahead(a->megakernel, &step, f);
}

enum nb_status nbi_execute_topk(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, int64_t M, int64_t J)
{
    int64_t ids = M * (int64_t)sizeof(int32_t), values = ids + M * J * (int64_t)sizeof(int32_t);
    NBI_BUG_IF(M > a->topk_rows);
    return w->be->topk(s, &(struct nbi_op_topk){.ids = nbi_ptr_add(a->topk, ids),
                                                .values = nbi_ptr_add(a->topk, values),
                                                .nonfinite = a->topk,
                                                .logits = a->logits,
                                                .scratch = a->topk_scratch,
                                                .k = J,
                                                .N = M,
                                                .V = w->config->vocab_size});
}
