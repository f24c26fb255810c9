/* backend.h - the contract between the model and whatever computes it.
 *
 * A backend is a table of functions over memory of its own. Host code holds addresses in that
 * memory (struct nbi_ptr) and never looks behind them; bytes go in and out by explicit copies.
 * Every operation takes a stream and one struct of arguments, is queued in order and returns once
 * queued; a result may be read after nbi_backend.sync. What a comment calls "host" is read before
 * the call returns, so it need not live longer.
 *
 * The scalar CPU code (cpu/microkernels_scalar.c) is the definition of each operation. Faster
 * versions are compared with it (tests/unit/test_ops.c), and it with Hugging Face.
 *
 * Letters: N rows (tokens), C hidden, F feed-forward, V vocabulary, NH query heads, NKV key/value
 * heads, D head size, K inputs and O outputs of a product. Activations are f32 on the CPU. */
#pragma once

#include "base/sys.h"
#include "tensor/dtype.h"

/* ---- memory ---- */

/* An address in a backend's memory; 0 is none. A type of its own, so that nobody reads it. */
struct nbi_ptr {
    uintptr_t at;
};

static inline struct nbi_ptr nbi_ptr_add(struct nbi_ptr p, int64_t bytes)
{
    return (struct nbi_ptr){p.at + (uintptr_t)bytes};
}

/* ---- weights ---- */

/* How a backend keeps a matrix; which it chooses is its own affair, apart from ROWS. */
enum nbi_weight_layout {
    NBI_WEIGHT_ROWS, /* row-major as stored: floats, or NVFP4 codes [O, K/2] and scales [O, K/16] */
    NBI_WEIGHT_TILES /* repacked for the product */
};

/* A matrix [O, K] or a vector [O]. */
struct nbi_weight {
    enum nbi_dtype dtype; /* f32, f16, bf16 or NVFP4 */
    enum nbi_weight_layout layout;
    int64_t rows, cols; /* cols 0: a vector */
    struct nbi_ptr data, scales;
    float tensor_scale; /* NVFP4; 1 otherwise */
    bool borrowed;      /* data belongs to someone else: a master */
};

/* Where a weight's values come from. */
struct nbi_weight_source {
    enum nbi_dtype dtype;
    int64_t rows, cols;
    float tensor_scale;
    /* Rows [first, first + count) into host memory: floats, or codes and scales. Threads may call
     * it at the same time. */
    enum nb_status (*read)(void *ctx, int64_t first, int64_t count, void *data, void *scales);
    void *ctx;
    bool lookup; /* embed alone will read it, a few rows at a time: need not be on a device */
};

/* ---- keys and values ---- */

/* Rows of keys and of values, each row NKV x D, for one layer. A cache, or in training simply what
 * the projections have just written. Row r of head h is at (r * NKV + h) * D. */
struct nbi_kv_view {
    struct nbi_ptr k, v;
    enum nbi_dtype dtype; /* f32, f16, bf16 or e4m3 */
};

/* Rows of a page, where the rows of a store are handed out in pages. */
#define NBI_PAGE 64

/* What backends count on: query heads that share a key, and the size of a head. */
#define NBI_SHARED_MAX 64
#define NBI_HEAD_MAX   1024

/* ---- a layer ---- */

struct nbi_layer_weights {
    struct nbi_weight input_norm, post_norm, q_norm, k_norm;
    struct nbi_weight q, k, v, o, gate, up, down;
};

/* ---- operations ---- */

/* x[n] = table[ids[n]], as f32. Ids are in range; the caller checks on the host. */
struct nbi_op_embed {
    struct nbi_ptr x;        /* [N, C] */
    struct nbi_ptr ids;      /* int32 [N] */
    struct nbi_weight table; /* [V, C], rows */
    int64_t N, C;
};

/* cos and sin of positions[n] * frequency[i] times scale, in f32 throughout as Hugging Face does.
 */
struct nbi_op_rope_table {
    struct nbi_ptr cos, sin;  /* [N, D/2] */
    struct nbi_ptr positions; /* int32 [N] */
    struct nbi_ptr frequency; /* f32 [D/2] */
    float scale;              /* YaRN's attention factor; 1 otherwise */
    int64_t N, D;
};

/* y = x / sqrt(mean(x^2) + eps) * w. rstd keeps the factor of each row for the backward pass. */
struct nbi_op_rmsnorm {
    struct nbi_ptr y;    /* [N, C]; may be x */
    struct nbi_ptr rstd; /* [N], or none */
    struct nbi_ptr x;    /* [N, C] */
    struct nbi_weight w; /* [C] */
    float eps;
    int64_t N, C;
};

/* y_i = x W_i^T, for up to three matrices that share x; y_i = y_i + x W_i^T with add. The products
 * of one call may run together. exact: f32 activations; else a backend may round x to fewer bits
 * (16 in blocks of 256 on the CPU; twice four for many rows where nbi_backend.fp4 says so). Each y
 * depends on its row of x alone, and on nothing else about the call: the same row gives the same
 * bits whatever N is. On a GPU that holds for exact ones, and for steady ones with NVFP4 matrices
 * of up to nbi_backend.batch_invariant_rows rows; others are done in the way that is best for N,
 * and with twice four bits the largest of all rows counts too. */
#define NBI_LINEAR_MAX 3

struct nbi_op_linear {
    int count;
    struct nbi_ptr y[NBI_LINEAR_MAX]; /* [N, O_i], disjoint from x */
    struct nbi_weight w[NBI_LINEAR_MAX];
    struct nbi_ptr x;   /* [N, K] */
    struct nbi_ptr act; /* of norm_linear, or none: see there */
    int64_t N, K;
    bool add, exact, batch_invariant;
};

/* Per head: RMSNorm of q and k with w of [D], then rotation of the pairs (i, i + D/2). q goes to
 * q_out, k and v to rows slots[n] of the store, rounded to its type. A backend may leave it to the
 * attention over q_out right behind it, if its tokens are alone; q_out is undefined then. */
struct nbi_op_qkv_rope {
    struct nbi_ptr q_out; /* [N, NH, D]; may be q */
    struct nbi_kv_view kv;
    struct nbi_ptr kv_rows;        /* int32 [N] */
    struct nbi_ptr q, k, v;        /* [N, NH, D], [N, NKV, D] twice */
    struct nbi_ptr rstd_q, rstd_k; /* [N, NH], [N, NKV], or none */
    struct nbi_weight q_norm, k_norm;
    struct nbi_ptr cos, sin; /* [N, D/2] */
    float eps;
    int64_t N, NH, NKV, D;
};

/* y[n] = softmax(q[n] k^T / sqrt(D)) v per head, over rows first[n] to last[n] of the store. lse
 * keeps the logarithm of each softmax's denominator, maximum included, for the backward pass.
 *
 * With pages, rows are counted within the token's own sequence: row r that token n sees is row
 * pages[tables[n] + r / NBI_PAGE] * NBI_PAGE + r % NBI_PAGE of the store, and first[n] is a
 * multiple of NBI_PAGE.
 *
 * The result of a row depends on q[n] and those rows alone, bit for bit; on a GPU also on the call
 * that it is part of, unless that is steady and N at most nbi_backend.batch_invariant_rows. */
struct nbi_op_attention {
    struct nbi_ptr y;   /* [N, NH, D] */
    struct nbi_ptr lse; /* [N, NH], or none */
    struct nbi_ptr q;   /* [N, NH, D] */
    struct nbi_kv_view kv;
    struct nbi_ptr first, last;   /* int32 [N]; first[n] <= last[n] */
    struct nbi_ptr pages, tables; /* int32 [.], int32 [N]; or none */
    int64_t max_keys;             /* no n sees more rows; close to it is faster */
    int64_t N, NH, NKV, D;
    bool exact; /* f32 throughout; else a backend may round q and the weights of the rows */
    /* Rows have few keys in common, or none: looking at them together gains nothing. */
    bool kv_unshared;
    /* Each row belongs to another sequence, and its own key is the last that it attends to. Older
     * keys and the index arrays were complete at the last upload. */
    bool one_row_per_sequence;
    /* The bits of a row do not depend on the other rows. */
    bool batch_invariant;
};

/* y = silu(gate) * up. */
struct nbi_op_swiglu {
    struct nbi_ptr y; /* [N, F]; may be gate */
    struct nbi_ptr gate, up;
    int64_t N, F;
};

/* y[i] = x[rows[i]]. */
struct nbi_op_gather {
    struct nbi_ptr y;    /* [M, C] */
    struct nbi_ptr x;    /* [., C] */
    struct nbi_ptr rows; /* int32 [M] */
    int64_t M, C;
};

/* y[rows[i]] = x[i]; no row twice. */
struct nbi_op_scatter {
    struct nbi_ptr y;    /* [., C] */
    struct nbi_ptr x;    /* [M, C] */
    struct nbi_ptr rows; /* int32 [M] */
    int64_t M, C;
};

/* The J largest logits of each row, largest first, of equals the lower id first; a zero is given as
 * +0. odd[n] is 1 if any of the row is not finite, and its results mean nothing then. J <= V. */
#define NBI_TOPK_MAX 64

struct nbi_op_topk {
    struct nbi_ptr ids;       /* int32 [N, k] */
    struct nbi_ptr values;    /* f32 [N, k] */
    struct nbi_ptr nonfinite; /* int32 [N] */
    struct nbi_ptr logits;    /* [N, V] */
    struct nbi_ptr scratch;   /* nbi_topk_scratch_bytes(V) bytes for each row, written to */
    int64_t k, N, V;
};

static inline int64_t nbi_topk_scratch_bytes(int64_t V)
{
    return (V + 2047) / 2048 * NBI_TOPK_MAX * 8;
}

/* loss[n] = -log softmax(logits[n])[targets[n]], 0 where the target is negative; with dlogits also
 * scale * (softmax - onehot), 0 there, in place of the logits if the two are the same.
 *
 * With J > 0 also what a base model thought: kl[n] = KL(base || softmax) over J ids of the base and
 * one bucket for all others, and dlogits gets kl_scale times its gradient. A row whose first id is
 * negative has none. */
struct nbi_op_xent {
    struct nbi_ptr loss;    /* [N] */
    struct nbi_ptr dlogits; /* [N, V], or none */
    struct nbi_ptr logits;  /* [N, V] */
    struct nbi_ptr targets; /* int32 [N] */
    float scale;
    struct nbi_ptr kl;      /* [N] */
    struct nbi_ptr ref_ids; /* int32 [N, ref_k], no id twice in a row */
    struct nbi_ptr ref_p;   /* f32 [N, ref_k] their probabilities */
    float kl_scale;
    int64_t ref_k, N, V;
};

/* loss[n] = mean over c of |x[n, c] - target[n, c]|; dx, if any, is scale / C times the sign of the
 * difference. Rows with weight 0 count as 0. */
struct nbi_op_l1 {
    struct nbi_ptr loss;      /* [N] */
    struct nbi_ptr dx;        /* [N, C], or none */
    struct nbi_ptr x, target; /* [N, C] */
    struct nbi_ptr weight;    /* f32 [N], 0 or 1 */
    float scale;
    int64_t N, C;
};

/* ---- backward; d of a quantity is the gradient of the loss ---- */

/* dtable[ids[n]] += dx[n]; rows of equal ids are added in the order of n. */
struct nbi_op_embed_bwd {
    struct nbi_ptr dtable; /* f32 [V, C] */
    struct nbi_ptr ids;
    struct nbi_ptr dx; /* [N, C] */
    int64_t N, C;
};

/* dx = dx + gradient through the norm; dw += over rows. */
struct nbi_op_rmsnorm_bwd {
    struct nbi_ptr dx, dw; /* [N, C], f32 [C] */
    struct nbi_ptr dy, x, rstd;
    struct nbi_weight w;
    int64_t N, C;
};

/* dx = sum_i dy_i W_i (with add: dx + ...), and dW_i += dy_i^T x. Either may be none. */
struct nbi_op_linear_bwd {
    int count;
    struct nbi_ptr dx;                 /* [N, K] */
    struct nbi_ptr dw[NBI_LINEAR_MAX]; /* f32 [O_i, K] */
    struct nbi_ptr dy[NBI_LINEAR_MAX];
    struct nbi_weight w[NBI_LINEAR_MAX];
    struct nbi_ptr x;
    int64_t N, K;
    bool add;
};

/* Through rotation and norm: dq and dk, given for what qkv_rope wrote, become those of its inputs
 * in place; dq_norm and dk_norm are added to. */
struct nbi_op_qkv_rope_bwd {
    struct nbi_ptr dq, dk;           /* [N, NH, D], [N, NKV, D] */
    struct nbi_ptr dq_norm, dk_norm; /* f32 [D] */
    struct nbi_ptr q, k;             /* inputs of qkv_rope */
    struct nbi_ptr rstd_q, rstd_k;
    struct nbi_weight q_norm, k_norm;
    struct nbi_ptr cos, sin;
    int64_t N, NH, NKV, D;
};

/* dk and dv are overwritten; row n attends to rows first[n] to n of its own batch. */
struct nbi_op_attention_bwd {
    struct nbi_ptr dq, dk, dv;
    struct nbi_ptr dy, y, lse, q;
    struct nbi_kv_view kv; /* f32 */
    struct nbi_ptr first;
    int64_t N, NH, NKV, D;
};

/* dgate and dup from dy; may be written over gate and up. */
struct nbi_op_swiglu_bwd {
    struct nbi_ptr dgate, dup; /* [N, F] */
    struct nbi_ptr dy, gate, up;
    int64_t N, F;
};

/* ---- the optimizer ---- */

/* What is known of a gradient: the sum of its squares, in an order that depends on n alone, its
 * largest magnitude, and how many values are not finite. The other two leave those out. */
struct nbi_op_grad_stats {
    struct nbi_ptr out;  /* f64 [3] */
    struct nbi_ptr grad; /* f32 [n] */
    int64_t n;
};

/* How a moment of Adam is kept.
 *
 * int8: groups of 32 with an f16 scale s, the largest magnitude rounded up. m: y = 2x / (1 + |x|)
 * of x = m / s as y * 127, back by y / (2 - |y|); v: sqrt(v) / s as u8 of 255, squared on the way
 * back, and 0 only for a v of 0.
 * nvfp4: groups of 16 with an E4M3 scale s times a scale S of the tensor; s is rounded up and at
 * least 2^-9. m: E2M1 codes as in weights, up to 6 * 448 * S. v: sqrt(v) = (code + 1) / 16 * s * S,
 * so never 0, and up to 448 * S. What is larger is cut.
 * bf16, int8 and nvfp4 are rounded stochastically, so that small changes are not lost: the mean of
 * m and of v stays, except where v is raised to its smallest code. Zero bytes are a state of zeros,
 * in nvfp4 a stored S of 0 is. */
enum nbi_moment_type { NBI_MOMENT_F32, NBI_MOMENT_BF16, NBI_MOMENT_INT8, NBI_MOMENT_NVFP4 };

struct nbi_moment {
    enum nbi_moment_type kind;
    struct nbi_ptr values; /* f32 [n], bf16 [n], u8 [n], or u8 [n/2 rounded up], low nibble first */
    struct nbi_ptr scales; /* f16 [n/32 rounded up], E4M3 [n/16 rounded up], or none */
};

/* Bytes of the values of n elements, and of their scales. */
static inline int64_t nbi_moment_bytes(enum nbi_moment_type kind, int64_t n, int64_t *scales)
{
    *scales = kind == NBI_MOMENT_INT8    ? (n + 31) / 32 * 2
              : kind == NBI_MOMENT_NVFP4 ? (n + 15) / 16
                                         : 0;
    return kind == NBI_MOMENT_F32    ? n * 4
           : kind == NBI_MOMENT_BF16 ? n * 2
           : kind == NBI_MOMENT_INT8 ? n
                                     : (n + 1) / 2;
}

/* AdamW on elements [first, first + count) of a tensor, both multiples of 32 except where the
 * tensor ends; in pieces or at once is the same. In f32, rounded at each step:
 *   g = grad * grad_scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) (g g)
 *   u = m / correct1 / (sqrt(v / correct2) + eps), in [-max_update, max_update] if that is > 0
 *   w = w - (lr decay) w - lr u
 * A bf16 master is rounded stochastically. The random bits of element e are half-word e % 8, the
 * lowest first, of Philox with `seed` as key and the counter (e / 8, tensor, step, what for: 0
 * master, 1 m, 2 v), so they depend on nothing else. Gradients that are not finite spoil their
 * elements' groups, no more. */
struct nbi_op_adamw {
    struct nbi_ptr master; /* [n] f32 or bf16 */
    enum nbi_dtype dtype;
    struct nbi_ptr grad; /* f32 [n] */
    struct nbi_moment m, v;
    float m_scale[2], v_scale[2]; /* nvfp4: S as stored, and S to store with; fresh state: 0, S */
    /* f32 [2] >= 0, or none: becomes the larger of itself and |m|, of itself and sqrt(v). */
    struct nbi_ptr running_max;
    int64_t first, count;
    float grad_scale, lr, beta1, beta2, eps, decay, correct1, correct2, max_update;
    uint64_t seed;
    uint32_t tensor, step;
};

/* A weight of the forward pass anew from its master [rows, cols]: NVFP4 with scales found by
 * `sweep` and the weight's tensor scale, or floats rounded to the nearest of `through`, which the
 * weight's type can hold: what will be written is what is used. Nothing happens to a weight that is
 * its master. Values are finite. */
struct nbi_op_requantize {
    struct nbi_weight w;
    struct nbi_ptr master;
    enum nbi_dtype dtype;    /* f32 or bf16 */
    enum nbi_dtype round_to; /* of floats: f32, bf16 or f16 */
};

/* The largest magnitude of a tensor; NaN and infinity come out as such. */
struct nbi_op_amax {
    struct nbi_ptr out; /* f32 [1] */
    struct nbi_ptr x;   /* [n] */
    enum nbi_dtype dtype;
    int64_t n;
};

/* ---- one token at once ---- */

/* A model of Qwen3's kind with the stores that its layers write to. */
struct nbi_megakernel_model {
    int64_t layers, C, F, NH, NKV, D, V;
    const struct nbi_layer_weights *layer; /* host, [layers]: what it says is copied */
    const struct nbi_kv_view *kv;          /* host, [layers] */
    struct nbi_weight embed, norm, head;
    struct nbi_ptr frequency; /* as in rope_table */
    float rope_scale, eps;
};

struct nbi_megakernel_step {
    int32_t id, position, kv_row, first, last;
    struct nbi_ptr logits; /* [V] */
};

/* How one of the best is drawn: each has a weight by its logit, e^((logit - the best) * cold) of
 * `unit`; top-p and min-p leave the first of them (infer/sampler.c). */
struct nbi_draw {
    double inv_temperature; /* 1 / temperature */
    double unit;
    double top_p, log_min_p;
    uint64_t uniform; /* where the draw falls in what is left, of 2^64 */
};

/* The J best of some logits, and with which of them it goes on: with one, that; else with the one
 * that is drawn, up to rounding. */
struct nbi_run_ahead {
    int64_t k; /* up to NBI_TOPK_MAX */
    struct nbi_draw draw;
    struct nbi_ptr topk; /* of k > 1: odd, ids [J] and values [J] as `top` left them */
    struct nb_candidate candidates[NBI_TOPK_MAX]; /* out, best first */
    int32_t id;                                   /* out, which it is */
    bool nonfinite; /* out: a logit was not finite, and nothing is to be had of the rest */
};

struct nbi_megakernel; /* a model made ready for it */

/* ---- again and again ---- */

#define NBI_GRAPH_KEYS 12

/* A list of operations that comes back, with other values at the same addresses. */
struct nbi_graph {
    int64_t key[NBI_GRAPH_KEYS]; /* host: all that decides which operations, and their arguments */
    enum nb_status (*queue)(void *ctx); /* calls them, and nothing else of the backend */
    void *ctx;
};

/* ---- the table ---- */

#define NBI_OP_LIST(X)                                                                             \
    X(embed)                                                                                       \
    X(rope_table)                                                                                  \
    X(rmsnorm)                                                                                     \
    X(linear)                                                                                      \
    X(qkv_rope)                                                                                    \
    X(attention)                                                                                   \
    X(swiglu)                                                                                      \
    X(gather)                                                                                      \
    X(scatter)                                                                                     \
    X(topk)                                                                                        \
    X(xent)                                                                                        \
    X(l1)                                                                                          \
    X(embed_bwd)                                                                                   \
    X(rmsnorm_bwd)                                                                                 \
    X(linear_bwd)                                                                                  \
    X(qkv_rope_bwd)                                                                                \
    X(attention_bwd)                                                                               \
    X(swiglu_bwd)                                                                                  \
    X(grad_stats)                                                                                  \
    X(adamw)                                                                                       \
    X(amax)                                                                                        \
    X(requantize)

struct nbi_stream; /* an in-order queue with scratch memory of its own */

/* What a stream will be asked for at most, so that it needs no memory later. */
struct nbi_stream_limits {
    int64_t N;     /* rows of an operation */
    int64_t K;     /* inputs of a product */
    int64_t D;     /* head size */
    int64_t heads; /* query heads */
    bool training; /* also a backward pass */
};

struct nbi_backend {
    const char *name;   /* "cpu", "cuda:0" */
    int64_t chunk;      /* rows of a pass that suit it, where there are many */
    bool batch_variant; /* what is not exact depends on how many rows go together */
    /* Where they matter: up to so many rows they do not, in products of NVFP4 and in what is row by
     * row anyway. */
    int64_t batch_invariant_rows;
    int64_t graph_rows; /* of passes that are worth `repeat` */
    /* How products of NVFP4 weights with many rows are done, in words; NULL: nothing to say. Known,
     * as what follows, once a stream for many rows was opened. */
    const char *prefill_path;
    bool fp4; /* on FP4 tensor cores: unless exact, x of them is two terms of NVFP4 */
    bool fp4_selftest_failed; /* there are such cores, but they are not used since they failed */
    void (*close)(struct nbi_backend *be);

    /* Memory, 64-byte aligned and cleared. What it is for shows in reports. */
    enum nb_status (*alloc)(struct nbi_backend *be, const char *what, int64_t bytes,
                            struct nbi_ptr *out);
    void (*free)(struct nbi_backend *be, struct nbi_ptr p);

    /* Takes a weight over. Not queued: it is there on return. */
    enum nb_status (*weight_new)(struct nbi_backend *be, const struct nbi_weight_source *src,
                                 struct nbi_weight *out);
    /* Room for a weight that refresh will fill: NVFP4 (cols a multiple of 16) or floats; cols 0 is
     * a vector, of f32. The tensor scale is 1 until the caller sets another. Instead of one with
     * the type of its master the caller may make one of the master itself: layout ROWS, data
     * the master's, borrowed. */
    enum nb_status (*weight_alloc)(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                   int64_t cols, struct nbi_weight *out);
    /* Rows [first, first + count) to the host, as nbi_weight_source.read gives them; scales may be
     * NULL for floats. Not queued: sync first. */
    enum nb_status (*weight_read)(struct nbi_backend *be, const struct nbi_weight *w, int64_t first,
                                  int64_t count, void *data, void *scales);
    void (*weight_free)(struct nbi_backend *be, struct nbi_weight *w);

    enum nb_status (*stream_new)(struct nbi_backend *be, const struct nbi_stream_limits *limits,
                                 struct nbi_stream **out);
    /* What stream_new will allocate. */
    int64_t (*stream_bytes)(struct nbi_backend *be, const struct nbi_stream_limits *limits);
    void (*stream_free)(struct nbi_stream *s); /* when all that is queued is done */
    enum nb_status (*sync)(struct nbi_stream *s);

    /* Copies, in the order of the queue. upload reads host memory before it returns; download is
     * complete after sync. */
    enum nb_status (*upload)(struct nbi_stream *s, struct nbi_ptr dst, const void *src,
                             int64_t bytes);
    enum nb_status (*download)(struct nbi_stream *s, void *dst, struct nbi_ptr src, int64_t bytes);
    enum nb_status (*copy)(struct nbi_stream *s, struct nbi_ptr dst, struct nbi_ptr src,
                           int64_t bytes);
    enum nb_status (*clear)(struct nbi_stream *s, struct nbi_ptr dst, int64_t bytes);

    /* For benches: multiplications per second of one core, or of the device, in NVFP4 products
     * whose data is as near as can be; and in those of floats, with all threads at work. */
    double (*roofline)(struct nbi_backend *be);
    double (*roofline_f32)(struct nbi_backend *be);
    /* For benches: bytes a second read from the memory; NULL: the host's, which the bench measures
     * itself. */
    double (*roofline_bandwidth)(struct nbi_backend *be);

    /* Optional: embedding, all layers and head for a single token, as the operations would do it
     * without `exact`, up to rounding; what is added to the residual stream may come as sums of up
     * to 2^19, more is NaN. NB_EUNSUPPORTED: not this model on this device. megakernel_free comes
     * when nothing is at work, and may come behind stream_free. */
    enum nb_status (*megakernel_new)(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                     struct nbi_megakernel **out);
    enum nb_status (*megakernel_run)(struct nbi_megakernel *t,
                                     const struct nbi_megakernel_step *step);
    /* Optional: one of the best of the last run's logits, and a run of that token queued behind
     * it, whatever id the step has. It returns when the best are known; the run may still be at
     * work. */
    enum nb_status (*megakernel_run_ahead)(struct nbi_megakernel *t,
                                           const struct nbi_megakernel_step *step,
                                           struct nbi_run_ahead *f);
    void (*megakernel_free)(struct nbi_megakernel *t);

    /* Optional: rmsnorm or swiglu, then linear of what it gave, with the bits of the two. What goes
     * from one to the other, y of the first and x of the second, may be written or not.
     *
     * Behind a product of a norm that has `act`, and two matrices, a swiglu_linear of both whose y
     * is `act` comes next, with a matrix of their type, as exact and as steady. What the first
     * gives may go straight there, with neither y nor `act` written; its sums may have another
     * order then. */
    enum nb_status (*norm_linear)(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                  const struct nbi_op_linear *a);
    enum nb_status (*swiglu_linear)(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                    const struct nbi_op_linear *a);

    /* Optional: the operations of r, in order with others of the stream. Those of a key that was
     * there before may be kept and queued at once, without asking r for them. That takes memory,
     * the only one that a stream takes after stream_new; what is kept is of a bounded number. */
    enum nb_status (*graph_run)(struct nbi_stream *s, const struct nbi_graph *r);

    /* Operations; a backend that cannot train has none of the backward ones. */
#define X(op) enum nb_status (*op)(struct nbi_stream * s, const struct nbi_op_##op *a);
    NBI_OP_LIST(X)
#undef X
};

struct nbi_backend_opts {
    const char *device;  /* "cpu", "cuda" or "cuda:N" */
    int threads;         /* CPU; 0: what this process may use */
    enum nbi_simd level; /* CPU: the widest to use */
};

/* be->close ends it. */
enum nb_status nbi_backend_open(struct nbi_backend **out, const struct nbi_backend_opts *opts);
