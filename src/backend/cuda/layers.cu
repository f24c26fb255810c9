/* layers.cu - layers and head of a pass, fused across operations.
 *
 * in : x, weights, indices
 * out: x, the KV cache, logits; everything is complete when the call's last kernel has run
 *
 * One step hands work or data to the next, in struct pass or in a local variable, never beyond the
 * call:
 *
 *   o, down      leave split-K sums partial; the norm that reads x next adds them (pending)
 *   norms        are packed as x of the product that follows (pack_activations.cu)
 *   qkv_rope     is left to attention of decode rows, where each row is a sequence of its own
 *   attention    of decode rows packs its result as x of o
 *   gate, up     store SwiGLU of both, packed as x of down
 *
 * With more rows than the decode kernels take, norms and SwiGLU are rounded to bf16 for cuBLASLt on
 * the way. Every other product takes the plain operations. */
#include "backend/cuda/pack_activations.cuh"

struct pass {
    struct nbi_stream *s;
    const struct nbi_op_layers *a;
    struct splitk_partials pending; /* what x still lacks; y NULL: nothing */
};

/* Completes x. */
static enum nb_status finish_x(struct pass *p)
{
    const struct splitk_partials pending = p->pending;
    p->pending = {};
    return nbi_cuda_splitk_reduce(p->s, &pending);
}

/* ---- norms and products ---- */

/* Products of x without their results. */
static struct nbi_op_linear product_of(const struct nbi_op_layers *a, struct nbi_ptr x, int64_t N,
                                       int64_t K)
{
    struct nbi_op_linear op = {};
    op.x = x;
    op.N = N;
    op.K = K;
    op.matmul = a->matmul;
    op.batch_invariant = a->batch_invariant;
    return op;
}

static void add_matrix(struct nbi_op_linear *op, struct nbi_ptr y, const struct nbi_weight &w)
{
    op->y[op->count] = y;
    op->w[op->count++] = w;
}

/* The norm of `from`, which op multiplies. With `gated`, SwiGLU of its two results goes to
 * s->act_f16, and y stays unwritten. */
static enum nb_status norm_product(struct pass *p, struct nbi_ptr from, const struct nbi_weight &w,
                                   const struct nbi_op_linear *op, bool gated)
{
    struct nbi_stream *s = p->s;
    struct nbi_op_rmsnorm norm = {};
    norm.y = op->x;
    norm.x = from;
    norm.w = w;
    norm.eps = p->a->eps;
    norm.N = op->N;
    norm.C = op->K;
    if (nbi_cuda_is_decode_linear(op)) {
        const struct splitk_partials pending = p->pending;
        p->pending = {};
        NBI_TRY(nbi_cuda_pack_norm(s, &norm, op, gated, &pending));
        return nbi_cuda_linear_packed(s, op, x_f16_of(s, op->N, op->K), gated, NULL);
    }
    NBI_TRY(finish_x(p));
    if (nbi_cuda_is_cublaslt_linear(s, op))
        return nbi_cuda_norm_linear_cublaslt(s, &norm, op);
    NBI_TRY(nbi_cuda_rmsnorm(s, &norm));
    return nbi_cuda_linear(s, op);
}

/* x = x + from w^T; `packed`: from is in s->x_f16. x may then lack what is pending. */
static enum nb_status add_product(struct pass *p, struct nbi_ptr from, int64_t K,
                                  const struct nbi_weight &w, bool packed)
{
    struct nbi_stream *s = p->s;
    struct nbi_op_linear op = product_of(p->a, from, p->a->N, K);
    add_matrix(&op, p->a->x, w);
    op.add = true;
    if (!nbi_cuda_is_decode_linear(&op))
        return nbi_cuda_linear(s, &op);
    if (!packed)
        NBI_TRY(nbi_cuda_pack_rows(s, &op));
    return nbi_cuda_linear_packed(s, &op, x_f16_of(s, op.N, K), false, &p->pending);
}

/* ---- attention ---- */

static struct nbi_op_qkv_rope rope_of(const struct nbi_op_layers *a,
                                      const struct nbi_layer_weights *w,
                                      const struct nbi_kv_view *kv)
{
    struct nbi_op_qkv_rope op = {};
    op.q_out = a->scratch.q_rot;
    op.kv = *kv;
    op.kv_rows = a->kv_rows;
    op.q = a->scratch.q;
    op.k = a->scratch.k;
    op.v = a->scratch.v;
    op.q_norm = w->q_norm;
    op.k_norm = w->k_norm;
    op.cos = a->cos;
    op.sin = a->sin;
    op.eps = a->eps;
    op.N = a->N;
    op.NH = a->NH;
    op.NKV = a->NKV;
    op.D = a->D;
    return op;
}

/* Of the first decode_rows rows, or of the others. */
static struct nbi_op_attention attention_of(const struct nbi_op_layers *a,
                                            const struct nbi_kv_view *kv, bool decode)
{
    int64_t from = decode ? 0 : a->decode_rows, values = from * a->NH * a->D,
            ints = from * (int64_t)sizeof(int32_t);
    struct nbi_op_attention op = {};
    op.y = nbi_ptr_add(a->scratch.att, values * (int64_t)sizeof(float));
    op.q = nbi_ptr_add(a->scratch.q_rot, values * (int64_t)sizeof(float));
    op.kv = *kv;
    op.first = nbi_ptr_add(a->first, ints);
    op.last = nbi_ptr_add(a->last, ints);
    op.pages = a->pages;
    if (a->pages.at)
        op.tables = nbi_ptr_add(a->tables, ints);
    op.max_keys = a->max_keys[!decode];
    op.N = decode ? a->decode_rows : a->N - from;
    op.NH = a->NH;
    op.NKV = a->NKV;
    op.D = a->D;
    op.matmul = a->matmul;
    op.kv_unshared = decode;
    op.batch_invariant = a->batch_invariant;
    return op;
}

/* att, and the rows of the KV cache. *packed: att is in s->x_f16 as well. */
static enum nb_status rope_and_attention(struct pass *p, const struct nbi_layer_weights *w,
                                         const struct nbi_kv_view *kv, bool *packed)
{
    const struct nbi_op_layers *a = p->a;
    const struct nbi_op_qkv_rope rope = rope_of(a, w, kv);
    *packed = false;
    if (a->decode_rows == 0 || a->decode_rows == a->N) {
        const struct nbi_op_attention all = attention_of(a, kv, a->decode_rows > 0);
        bool fused = a->one_row_per_sequence && nbi_cuda_is_decode_attention(&all);
        if (!fused)
            NBI_TRY(nbi_cuda_qkv_rope(p->s, &rope));
        return nbi_cuda_attention_packed(p->s, &all, fused ? &rope : NULL, packed);
    }
    const struct nbi_op_attention first = attention_of(a, kv, true),
                                  rest = attention_of(a, kv, false);
    NBI_TRY(nbi_cuda_qkv_rope(p->s, &rope));
    NBI_TRY(nbi_cuda_attention(p->s, &first));
    return nbi_cuda_attention(p->s, &rest);
}

/* ---- a pass ---- */

static enum nb_status attention_block(struct pass *p, const struct nbi_layer_weights *w,
                                      const struct nbi_kv_view *kv)
{
    const struct nbi_op_layers *a = p->a;
    struct nbi_op_linear qkv = product_of(a, a->scratch.norm1, a->N, a->C);
    bool packed;
    add_matrix(&qkv, a->scratch.q, w->q);
    add_matrix(&qkv, a->scratch.k, w->k);
    add_matrix(&qkv, a->scratch.v, w->v);
    NBI_TRY(norm_product(p, a->x, w->input_norm, &qkv, false));
    NBI_TRY(rope_and_attention(p, w, kv, &packed));
    return add_product(p, a->scratch.att, a->NH * a->D, w->o, packed);
}

static enum nb_status mlp_block(struct pass *p, const struct nbi_layer_weights *w)
{
    const struct nbi_op_layers *a = p->a;
    struct nbi_op_linear gate_up = product_of(a, a->scratch.norm2, a->N, a->C);
    struct nbi_op_linear down = product_of(a, a->scratch.act, a->N, a->F);
    struct nbi_op_swiglu act = {};
    add_matrix(&gate_up, a->scratch.gate, w->gate);
    add_matrix(&gate_up, a->scratch.up, w->up);
    add_matrix(&down, a->x, w->down);
    down.add = true;
    bool gated = nbi_cuda_is_decode_linear(&gate_up) && nbi_cuda_is_decode_linear(&down);
    NBI_TRY(norm_product(p, a->x, w->post_norm, &gate_up, gated));
    if (gated)
        return nbi_cuda_linear_packed(p->s, &down, act_f16_of(p->s, a->N, a->F), false,
                                      &p->pending);
    act.y = a->scratch.act;
    act.gate = a->scratch.gate;
    act.up = a->scratch.up;
    act.N = a->N;
    act.F = a->F;
    if (nbi_cuda_is_decode_linear(&down)) {
        NBI_TRY(nbi_cuda_pack_swiglu(p->s, &act, &down));
        return nbi_cuda_linear_packed(p->s, &down, x_f16_of(p->s, a->N, a->F), false, &p->pending);
    }
    if (nbi_cuda_is_cublaslt_linear(p->s, &down))
        return nbi_cuda_swiglu_linear_cublaslt(p->s, &act, &down);
    NBI_TRY(nbi_cuda_swiglu(p->s, &act));
    return nbi_cuda_linear(p->s, &down);
}

static enum nb_status run_head(struct pass *p)
{
    const struct nbi_op_layers *a = p->a;
    const struct nbi_head *h = &a->head;
    struct nbi_op_linear op = product_of(a, h->final, h->M, a->C);
    struct nbi_ptr from = a->x;
    if (h->M == 0)
        return NB_OK;
    if (h->rows.at) {
        struct nbi_op_gather rows = {};
        rows.y = from = h->final;
        rows.x = a->x;
        rows.rows = h->rows;
        rows.M = h->M;
        rows.C = a->C;
        NBI_TRY(finish_x(p));
        NBI_TRY(nbi_cuda_gather(p->s, &rows));
    }
    add_matrix(&op, h->logits, h->w);
    return norm_product(p, from, h->norm, &op, false);
}

enum nb_status nbi_cuda_layers(struct nbi_stream *s, const struct nbi_op_layers *a)
{
    struct pass p = {s, a, {}};
    CU_HERE(s);
    NBI_BUG_IF(a->head.M > 0 && !a->head.rows.at && a->head.M != a->N);
    for (int64_t i = 0; i < a->count; i++) {
        NBI_TRY(attention_block(&p, &a->w[i], &a->kv[i]));
        NBI_TRY(mlp_block(&p, &a->w[i]));
    }
    NBI_TRY(run_head(&p));
    return finish_x(&p);
}
