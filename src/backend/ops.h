/* ops.h - the operations of the forward pass: equation, shapes, types and aliasing of each.
 *
 * Letters: N rows (tokens), C hidden size, F feed-forward size, V vocabulary, NH query heads, NKV
 * key/value heads, D head size, K inputs and O outputs of a product, M selected rows.
 *
 * Unless a contract says otherwise: activations are f32, or bf16 where `bf16` is set, row-major and
 * contiguous; indices are int32 and all else is f32; a row stride (ld) counts elements, and 0 means
 * contiguous; "none" is an nbi_ptr of 0; outputs overlap neither inputs nor each other; all
 * operations are asynchronous (backend.h). Backends agree up to rounding, within the tolerances of
 * tests/unit/test_ops.c and test_attention.c. On one backend a row's result depends on that row
 * alone: the same row gives the same bits whatever N is.
 *
 * With bf16, an operation reads bf16, computes in f32 and rounds what it writes to the nearest
 * bf16. It is for training, on backends with NBI_CAP_BF16. */
#pragma once

#include "backend/backend.h"

/* x[n] = table[ids[n]], converted to f32; exact. 0 <= ids[n] < V, which the caller has checked. */
struct nbi_op_embed {
    struct nbi_ptr x;        /* [N, C] */
    struct nbi_ptr ids;      /* [N] */
    struct nbi_weight table; /* [V, C], floats, layout ROWS */
    int64_t N, C;
    bool bf16; /* x */
};

/* cos[n, i] = scale * cos(positions[n] * frequency[i]), and sin likewise. The angle is rounded to
 * f32, as in Hugging Face's code. */
struct nbi_op_rope_table {
    struct nbi_ptr cos, sin;  /* [N, D/2] */
    struct nbi_ptr positions; /* [N] */
    struct nbi_ptr frequency; /* f32 [D/2] */
    float scale;              /* YaRN's attention factor; 1 otherwise */
    int64_t N, D;
};

/* rstd[n] = 1 / sqrt(mean(x[n]^2) + eps);  y[n] = x[n] * rstd[n] * w. */
struct nbi_op_rmsnorm {
    struct nbi_ptr y;    /* [N, C]; may be x */
    struct nbi_ptr rstd; /* [N] for rmsnorm_bwd, or none */
    struct nbi_ptr x;    /* [N, C] */
    struct nbi_weight w; /* [C] */
    float eps;
    int64_t N, C;
    bool bf16; /* x and y */
};

#define NBI_LINEAR_MAX 3

/* y_i = x W_i^T for up to three matrices that share x; with add, y_i = y_i + x W_i^T, or with r
 * (one matrix) y = r + x W^T. f32 accumulation. The products may run in parallel, or as one if y_i
 * are neighbouring columns of the same rows.
 *
 * With NBI_MATMUL_FAST the CPU rounds x to 16-bit integers in blocks of 256, a GPU to 16 bits or,
 * for many rows and NBI_CAP_FP4, to the sum of two NVFP4 values that share one scale per call.
 *
 * On a GPU a row's bits depend on that row alone with NBI_MATMUL_F32, or if batch_invariant is set,
 * all matrices are NVFP4 and N <= nbi_backend.batch_invariant_rows. Otherwise the kernel is chosen
 * by N, and with NBI_CAP_FP4 the amax over all rows counts too. */
struct nbi_op_linear {
    int count;                        /* matrices */
    struct nbi_ptr y[NBI_LINEAR_MAX]; /* [N, O_i] */
    struct nbi_weight w[NBI_LINEAR_MAX];
    struct nbi_ptr x;            /* [N, K] */
    struct nbi_ptr r;            /* [N, O_0] with add, in place of y_0; or none */
    int64_t ldy[NBI_LINEAR_MAX]; /* row strides of y_i */
    int64_t N, K;
    enum nbi_matmul matmul;
    bool add, batch_invariant;
    bool bf16; /* x, y and r */
};

/* Per head: q_out = rope(rmsnorm(q, q_norm)); row kv_rows[n] of the cache gets
 * rope(rmsnorm(k, k_norm)) and v, rounded to its type. rope rotates the pairs (i, i + D/2):
 * (a, b) -> (a cos - b sin, b cos + a sin). */
struct nbi_op_qkv_rope {
    struct nbi_ptr q_out; /* [N, NH, D]; may be q, if that is contiguous */
    struct nbi_kv_view kv;
    struct nbi_ptr kv_rows;        /* [N], no row twice */
    struct nbi_ptr q, k, v;        /* [N, NH, D], [N, NKV, D], [N, NKV, D] */
    struct nbi_ptr rstd_q, rstd_k; /* [N, NH], [N, NKV] for qkv_rope_bwd, or none */
    struct nbi_weight q_norm, k_norm;
    struct nbi_ptr cos, sin; /* [N, D/2] */
    float eps;
    int64_t N, NH, NKV, D;
    int64_t ld; /* row stride of q, k and v */
    bool bf16;  /* q_out, q, k and v */
};

/* y[n] = softmax(q[n] k^T / sqrt(D)) v per head, over rows first[n] to last[n] of kv, both
 * included. Query head h uses key head h / (NH / NKV). lse[n] is the log of the softmax's
 * denominator, with the maximum added back, for attention_bwd.
 *
 * With pages, first and last count rows within the token's own sequence: row r lies at row
 * pages[tables[n] + r / NBI_PAGE] * NBI_PAGE + r % NBI_PAGE of kv, and first[n] is a multiple of
 * NBI_PAGE.
 *
 * On a GPU a row's bits depend on that row and its keys alone if batch_invariant is set and
 * N <= nbi_backend.batch_invariant_rows; otherwise the split of keys over CTAs depends on the call.
 */
struct nbi_op_attention {
    struct nbi_ptr y;   /* [N, NH, D] */
    struct nbi_ptr lse; /* [N, NH], or none */
    struct nbi_ptr q;   /* [N, NH, D] */
    struct nbi_kv_view kv;
    struct nbi_ptr first, last;   /* [N]; first[n] <= last[n] */
    struct nbi_ptr pages, tables; /* page numbers [.], start of each row's list [N]; or none */
    int64_t max_keys;             /* upper bound of last[n] - first[n] + 1; a tight one is faster */
    int64_t N, NH, NKV, D;
    enum nbi_matmul matmul; /* NBI_MATMUL_FAST: q and the probabilities may be rounded */
    bool kv_unshared;       /* rows share few keys or none, so reading keys for several rows at once
                             * gains nothing */
    bool batch_invariant;   /* a row's bits must not depend on the other rows */
    bool bf16;              /* y and q */
};

/* y = silu(gate) * up, with silu(g) = g / (1 + e^-g). */
struct nbi_op_swiglu {
    struct nbi_ptr y; /* [N, F]; may be gate, if that is contiguous */
    struct nbi_ptr gate, up;
    int64_t N, F;
    int64_t ld; /* row stride of gate and up */
    bool bf16;  /* y, gate and up */
};

/* y[i] = x[rows[i]]; exact. */
struct nbi_op_gather {
    struct nbi_ptr y;    /* [M, C] */
    struct nbi_ptr x;    /* [., C] */
    struct nbi_ptr rows; /* [M] */
    int64_t M, C;
    bool bf16; /* x and y */
};

/* y[rows[i]] = x[i]; exact. Other rows of y keep their values. */
struct nbi_op_scatter {
    struct nbi_ptr y;    /* [., C] */
    struct nbi_ptr x;    /* [M, C] */
    struct nbi_ptr rows; /* [M], no row twice */
    int64_t M, C;
    bool bf16; /* x and y */
};

#define NBI_TOPK_MAX 64

/* The k largest logits of each row in descending order, ties by ascending id; exact, and -0 is
 * returned as +0. nonfinite[n] is 1 if the row has a NaN or infinity, and its ids and values are
 * then undefined. 1 <= k <= NBI_TOPK_MAX and k <= V. */
struct nbi_op_topk {
    struct nbi_ptr ids;       /* [N, k] */
    struct nbi_ptr values;    /* f32 [N, k] */
    struct nbi_ptr nonfinite; /* int32 [N] */
    struct nbi_ptr logits;    /* [N, V] */
    struct nbi_ptr scratch;   /* N * nbi_topk_scratch_bytes(V) bytes, overwritten */
    int64_t k, N, V;
};

/* A list of NBI_TOPK_MAX 64-bit keys for each 2048 logits. */
static inline int64_t nbi_topk_scratch_bytes(int64_t V)
{
    return (V + 2047) / 2048 * NBI_TOPK_MAX * 8;
}
