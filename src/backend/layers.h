/* layers.h - layers and head of a forward pass as one operation, for backends that fuse more than
 * the operations of ops.h allow.
 *
 * It is optional (NBI_CAP_LAYERS). Without it, and for passes that keep activations for a backward
 * pass, model/forward.c queues the operations of ops.h. Letters, types and rules are theirs. */
#pragma once

#include "backend/ops.h"

/* logits = rmsnorm(x[rows], norm) w^T. */
struct nbi_head {
    struct nbi_ptr logits; /* [M, V] */
    struct nbi_ptr rows;   /* [M] of x; or none: all N rows, in order */
    struct nbi_ptr final;  /* [M, C], scratch */
    struct nbi_weight norm, w;
    int64_t M; /* 0: no logits are wanted */
};

/* Memory between the operations of a layer, undefined after the call. norm1, q, k, v and att may
 * overlap norm2, gate, up and act; q_rot may be q, and act may be gate. */
struct nbi_layer_scratch {
    struct nbi_ptr norm1, norm2;  /* [N, C] */
    struct nbi_ptr q, q_rot, att; /* [N, NH, D] */
    struct nbi_ptr k, v;          /* [N, NKV, D] */
    struct nbi_ptr gate, up, act; /* [N, F] */
};

/* For each of `count` layers:
 *
 *   norm1 = rmsnorm(x, input_norm);  q, k, v = norm1 Wq^T, norm1 Wk^T, norm1 Wv^T
 *   q_rot and rows kv_rows of kv = qkv_rope(q, k, v);  att = attention(q_rot, kv)
 *   x = x + att Wo^T
 *   norm2 = rmsnorm(x, post_norm);  gate, up = norm2 Wgate^T, norm2 Wup^T
 *   x = x + (silu(gate) * up) Wdown^T
 *
 * and then the logits. x, rows kv_rows of each kv, and the logits are what it writes. They are
 * those of the operations of ops.h up to rounding, since with NBI_MATMUL_FAST what stands between
 * two products may be rounded in another way. Batch invariance is that of linear and attention. */
struct nbi_op_layers {
    struct nbi_ptr x;                  /* [N, C] */
    const struct nbi_layer_weights *w; /* host [count] */
    const struct nbi_kv_view *kv;      /* host [count] */
    int64_t count;                     /* 0: only the head */
    struct nbi_head head;
    struct nbi_layer_scratch scratch;
    struct nbi_ptr cos, sin; /* [N, D/2] */
    /* As in nbi_op_qkv_rope and nbi_op_attention. */
    struct nbi_ptr kv_rows, first, last, pages, tables;
    /* Two attentions: the first decode_rows rows are kv_unshared, the others are not; each part has
     * a bound on the keys that its rows see. */
    int64_t decode_rows, max_keys[2];
    float eps;
    int64_t N, C, F, NH, NKV, D;
    enum nbi_matmul matmul;
    bool batch_invariant;
    /* Each row belongs to another sequence; its own key is the last it attends to. Older keys and
     * the index arrays were complete at the last upload, so they may be read before earlier work on
     * the stream has ended. */
    bool one_row_per_sequence;
};
