/* ops_train.h - the operations of training: losses, gradients, the optimizer.
 *
 * Letters, types and rules are those of ops.h. dx is the gradient of the loss by x. Gradients of
 * weights are f32 unless said otherwise, and are added to. Sums have an order that the shapes alone
 * decide, so results do not depend on the number of threads or the device's speed. The operations
 * of the optimizer and embed_bwd give the same bits on every backend, with every instruction set.
 * Tolerances: tests/unit/test_backward.c, test_backward_products.c. */
#pragma once

#include "backend/ops.h"

/* ---- losses ---- */

/* loss[n] = -log p[targets[n]] with p = softmax(logits[n]), and 0 where the target is negative.
 * dlogits = scale * (p - onehot(target)), and 0 there.
 *
 * With ref_k > 0 also the divergence from a reference model, whose probabilities b are known for
 * ref_k ids: kl[n] = KL(b || p) over those ids and one bucket of all others. dlogits gets kl_scale
 * times its gradient in addition. A row whose first reference id is negative has no reference: kl
 * is 0.
 *
 * What is kept of a row lets xent_slice make the gradient of some of its logits later. */
struct nbi_op_xent {
    struct nbi_ptr loss;    /* [N] */
    struct nbi_ptr dlogits; /* [N, V], or none; may be logits */
    struct nbi_ptr logits;  /* [N, V] */
    struct nbi_ptr targets; /* [N] */
    float scale;
    struct nbi_ptr kl;      /* [N]; may be none if ref_k is 0 */
    struct nbi_ptr ref_ids; /* [N, ref_k], no id twice in a row */
    struct nbi_ptr ref_p;   /* [N, ref_k] probabilities */
    float kl_scale;
    struct nbi_ptr weight; /* [N], factors of each row's dlogits; or none */
    struct nbi_ptr kept;   /* [N] struct nbi_xent_kept, written; or none */
    int64_t ref_k, N, V;
    bool bf16; /* logits and dlogits */
};

/* Of a row of logits: the maximum, and by what e^(logit - maximum) is multiplied, for ids that the
 * row's reference does not list and for those that it does. */
struct nbi_xent_kept {
    double listed;
    float others, max;
};

/* dlogits as xent makes them, of ids first to first + count - 1 alone, whose logits have been
 * computed again. All else is what xent got. */
struct nbi_op_xent_slice {
    struct nbi_ptr dlogits; /* [N, count]; may be logits */
    struct nbi_ptr logits;  /* [N, count] */
    struct nbi_ptr targets; /* [N] */
    struct nbi_ptr kept;    /* [N], as xent left it */
    float scale;
    struct nbi_ptr ref_ids, ref_p; /* [N, ref_k] */
    float kl_scale;
    struct nbi_ptr weight; /* [N] or none */
    int64_t ref_k, N, first, count;
    bool bf16; /* logits and dlogits */
};

/* loss[n] = mean over c of |x[n, c] - target[n, c]|, and 0 where weight[n] is 0.
 * dx[n, c] = scale / C * sign(x[n, c] - target[n, c]), and 0 there. */
struct nbi_op_l1 {
    struct nbi_ptr loss;      /* [N] */
    struct nbi_ptr dx;        /* [N, C], or none */
    struct nbi_ptr x, target; /* [N, C] */
    struct nbi_ptr weight;    /* [N], 0 or 1 */
    float scale;
    int64_t N, C;
    bool bf16; /* dx, x and target */
};

/* ---- backward ---- */

/* dtable[ids[n]] += dx[n]. Rows with equal ids are added in the order of n, each to dtable itself.
 * `order` is the numbers 0 to N - 1 sorted by ids[n] and then by n. With count > 0 only for ids
 * first to first + count - 1, which dtable begins with. */
struct nbi_op_embed_bwd {
    struct nbi_ptr dtable; /* f32 [V, C], or [count, C] */
    int64_t first, count;
    struct nbi_ptr ids;   /* [N] */
    struct nbi_ptr order; /* [N] */
    struct nbi_ptr dx;    /* [N, C] */
    int64_t N, C;
    bool bf16; /* dx */
};

/* dx += gradient of rmsnorm by x;  dw += sum over n of dy[n] * x[n] * rstd[n]. */
struct nbi_op_rmsnorm_bwd {
    struct nbi_ptr dx, dw; /* [N, C], f32 [C] */
    struct nbi_ptr dy, x;  /* [N, C] */
    struct nbi_ptr rstd;   /* [N], as rmsnorm left it */
    struct nbi_weight w;
    int64_t N, C;
    bool bf16; /* dx, dy and x */
};

/* dx = sum over i of dy_i W_i, or dx + that with add;  dW_i += dy_i^T x, or with fresh dW_i = that.
 * dx, and each dW_i, may be none. Products are of f32, or of bf16 with f32 accumulation. */
struct nbi_op_linear_bwd {
    int count;
    struct nbi_ptr dx;                 /* [N, K] */
    struct nbi_ptr dw[NBI_LINEAR_MAX]; /* f32 [O_i, K] */
    struct nbi_ptr dy[NBI_LINEAR_MAX]; /* [N, O_i] */
    struct nbi_weight w[NBI_LINEAR_MAX];
    struct nbi_ptr x;            /* [N, K] */
    int64_t ldy[NBI_LINEAR_MAX]; /* row strides of dy_i */
    int64_t N, K;
    bool add, fresh;
    bool bf16;    /* dx, dy and x */
    bool dw_bf16; /* dW_i are bf16, rounded when they are written; needs bf16 and fresh */
};

/* In place: dq and dk come in as gradients of what qkv_rope wrote, and leave as gradients of its
 * inputs q and k. dq_norm and dk_norm are added to. */
struct nbi_op_qkv_rope_bwd {
    struct nbi_ptr dq, dk;           /* [N, NH, D], [N, NKV, D] */
    struct nbi_ptr dq_norm, dk_norm; /* f32 [D] */
    struct nbi_ptr q, k;             /* inputs of qkv_rope */
    struct nbi_ptr rstd_q, rstd_k;   /* as qkv_rope left them */
    struct nbi_weight q_norm, k_norm;
    struct nbi_ptr cos, sin;
    int64_t N, NH, NKV, D;
    int64_t ld; /* row stride of dq and dk, and of q and k */
    bool bf16;  /* dq, dk, q and k */
};

/* Gradients of attention without pages, where row n attends to rows first[n] to n. dq, dk and dv
 * are overwritten. */
struct nbi_op_attention_bwd {
    struct nbi_ptr dq, dk, dv;    /* [N, NH, D], [N, NKV, D], [N, NKV, D] */
    struct nbi_ptr dy, y, lse, q; /* [N, NH, D]; lse [N, NH] */
    struct nbi_kv_view kv;        /* f32, or bf16 with bf16 */
    struct nbi_ptr first, end;    /* [N]; end[n] is the last row that attends to row n, so rows of
                                   * one document have the same first and end */
    int64_t N, NH, NKV, D;
    int64_t ld; /* row stride of dq, dk and dv */
    bool bf16;  /* dq, dk, dv, dy, y and q */
};

/* dgate = dy * up * silu'(gate);  dup = dy * silu(gate). */
struct nbi_op_swiglu_bwd {
    struct nbi_ptr dgate, dup; /* [N, F]; may be gate and up */
    struct nbi_ptr dy, gate, up;
    int64_t N, F;
    int64_t ld; /* row stride of dgate, dup, gate and up */
    bool bf16;  /* all of them */
};

/* ---- the optimizer ---- */

/* What the optimizer keeps for each tensor in the backend's memory, from step to step; zeros for a
 * fresh state. The host reads it for checkpoints only. */
struct nbi_update_record {
    double squares, amax, nonfinite; /* of the gradient: written by grad_stats */
    float m_max, v_max;              /* largest |m| and sqrt(v) that are stored: by adamw */
    /* nvfp4 moments: S before this update (0: the moments are zero), and from it on: by
     * update_plan. */
    float m_scale[2], v_scale[2];
};

/* What an update has for all of its tensors, in the backend's memory: written by update_plan. */
struct nbi_update_control {
    double squares, nonfinite; /* sums over the tensors, in order */
    float grad_scale;          /* clipping */
    int32_t skip;              /* a gradient is not finite: adamw changes nothing */
};

/* squares, amax and nonfinite of a gradient: the sum of squares, the largest magnitude and the
 * number of non-finite values, which sum and amax leave out. The order of the sum depends on n
 * alone. */
struct nbi_op_grad_stats {
    struct nbi_ptr record; /* of the tensor */
    struct nbi_ptr grad;   /* [n] */
    int64_t n;
    bool bf16; /* grad */
};

/* Prepares the update of `count` tensors whose gradients have been measured:
 *   norm = sqrt(sum of squares);  grad_scale = clip / norm if clip > 0 and norm > clip, else 1
 * in f64, rounded once. Unless the update is skipped, for each tensor, in f32, each step rounded:
 *   a = amax * grad_scale;  S[0] = S[1] of m and of v;  then
 *   m: S[1] = max((beta1 m_max + (1 - beta1) a) * 1.001 / (6 * 448), 1e-30)
 *   v: S[1] = max(sqrt(beta2 v_max v_max + (1 - beta2) a a) * 1.001 / 448, 1e-30)
 * which bounds the new moments, and m_max = v_max = 0. */
struct nbi_op_update_plan {
    struct nbi_ptr control; /* written */
    struct nbi_ptr records; /* of all tensors */
    struct nbi_ptr tensors; /* [count] the records of this update, in order */
    int64_t count;
    float clip, beta1, beta2;
};

/* How a moment of Adam is stored.
 *
 * int8: groups of 32 share an f16 scale s, the group's amax rounded up (of v: of sqrt(v)).
 *   m: code = 127 y with x = m / s and y = 2x / (1 + |x|); decoded as y / (2 - |y|) * s.
 *   v: code = 255 sqrt(v) / s, at least 1 unless v is 0; decoded as the square.
 * nvfp4: groups of 16 share an E4M3 scale s, rounded up and at least 2^-9, times a scale S of the
 *   tensor.
 *   m: E2M1 codes as in weights, magnitudes up to 6 * 448 * S.
 *   v: sqrt(v) = (code + 1) / 16 * s * S, so never 0, and up to 448 * S.
 *   Larger magnitudes are clamped.
 *
 * bf16, int8 and nvfp4 round stochastically, so that small changes are not lost: rounding keeps the
 * mean of m and of v, except where v is raised to its smallest code. All-zero bytes decode to
 * zeros; in nvfp4 they do so if the stored S is 0. */
struct nbi_moment {
    enum nb_moment_type kind;
    struct nbi_ptr values; /* f32 [n], bf16 [n], u8 [n], or u8 [ceil(n/2)], low nibble first */
    struct nbi_ptr scales; /* f16 [ceil(n/32)], E4M3 [ceil(n/16)], or none */
};

/* Returns the bytes of the values of n elements; *scales gets the bytes of their scales. */
static inline int64_t nbi_moment_bytes(enum nb_moment_type kind, int64_t n, int64_t *scales)
{
    *scales = kind == NB_MOMENT_INT8    ? (n + 31) / 32 * 2
              : kind == NB_MOMENT_NVFP4 ? (n + 15) / 16
                                        : 0;
    return kind == NB_MOMENT_F32    ? n * 4
           : kind == NB_MOMENT_BF16 ? n * 2
           : kind == NB_MOMENT_INT8 ? n
                                    : (n + 1) / 2;
}

/* w = master [rows, cols], rounded as an exported model will have it: NVFP4 with block scales
 * found by `sweep` and w's tensor scale, or floats rounded to the nearest of round_to, which w's
 * type can represent. A weight that is its own master is left alone. Values are finite. If w has a
 * copy in bf16, it is made too. */
struct nbi_op_requantize {
    struct nbi_weight w;
    struct nbi_ptr master;
    enum nbi_dtype dtype;    /* of the master: f32 or bf16 */
    enum nbi_dtype round_to; /* of floats: f32, bf16 or f16 */
};

/* AdamW on elements [first, first + count) of a tensor. Both are multiples of 32, except where the
 * tensor ends; a tensor in pieces gets the same bits as a whole one. In f32, each step rounded:
 *   g = grad * grad_scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) (g g)
 *   u = m / correct1 / (sqrt(v / correct2) + eps), clamped to +-max_update if that is > 0
 *   w = w - (lr decay) w - lr u
 * A bf16 master is rounded stochastically. The random bits of element e are half-word e % 8, the
 * lowest first, of Philox with `seed` as key and the counter (e / 8, tensor, step, purpose), where
 * the purpose is 0 for the master, 1 for m and 2 for v; they depend on nothing else. m_max and
 * v_max of the record are raised to the largest |m| and the largest sqrt(v). Nothing at all happens
 * if the control says skip. m and v are of one kind. Addresses of arrays are multiples of 16.
 *
 * If w has data, its rows are then made from their masters, as by requantize: one pass over memory
 * instead of two. first and count are whole rows of w, and the pieces of a tensor come in order. */
struct nbi_op_adamw {
    struct nbi_ptr control, record;
    struct nbi_ptr master; /* [n] f32 or bf16 */
    enum nbi_dtype dtype;  /* of the master */
    struct nbi_ptr grad;   /* [n], or from element grad_first on, a multiple of 32 */
    bool grad_bf16;
    int64_t grad_first;
    struct nbi_moment m, v;
    int64_t first, count;
    float lr, beta1, beta2, eps, decay, correct1, correct2, max_update;
    uint64_t seed;
    uint32_t tensor, step;
    struct nbi_weight w;
    enum nbi_dtype round_to; /* of w's floats */
};

/* out = the amax of a tensor; a NaN or infinity in x comes out as such. */
struct nbi_op_amax {
    struct nbi_ptr out; /* f32 [1] */
    struct nbi_ptr x;   /* [n] */
    enum nbi_dtype dtype;
    int64_t n;
};

/* Random values whose deviation is about `deviation`: element e is the sum of the four bytes of
 * word e % 4 of Philox, with `seed` as key and the counter (e / 4, stream), less 510, times
 * deviation / sqrt(21845), which is the deviation of such a sum; rounded to f32 and then to dtype.
 * So its bits are the same everywhere, and far tails are missing: magnitudes end at 3.45
 * deviations. */
#define NBI_DRAW_DEVIATION 147.80054f

struct nbi_op_draw {
    struct nbi_ptr out;   /* [n] */
    enum nbi_dtype dtype; /* f32 or bf16 */
    int64_t n;
    float deviation;
    uint64_t seed, stream;
};
