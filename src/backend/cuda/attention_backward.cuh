/* attention_backward.cuh - what the kernels of attention's backward pass share.
 *
 * With s_ij = q_i . k_j, p_ij = exp(scale s_ij - lse_i) where first[i] <= j <= i and 0 elsewhere,
 * and delta_i = dy_i . y_i:
 *
 *   dv_j = sum over i of p_ij dy_i        ds_ij = p_ij (dy_i . v_j - delta_i)
 *   dq_i = scale sum over j of ds_ij k_j  dk_j = scale sum over i of ds_ij q_i
 *
 * One kernel owns queries and sums dq, another owns keys and sums dk and dv over the heads of a
 * group. That is 7 products where 5 would do, but each sum belongs to one CTA, which adds in the
 * order of heads and rows, so results do not depend on timing.
 *
 * Neither first nor end decreases from row to row: documents follow one another. So the last key of
 * a tile has the last query that sees any of them, and the first query has the first key. */
#pragma once

#include "backend/cuda/attention.cuh"

extern "C" {
#include "backend/ops_train.h"
}

struct attention_bwd_args {
    void *dq, *dk, *dv;             /* f32 or bf16, like all other rows */
    const void *dy, *y, *q, *k, *v; /* [N, NH, D], k and v [N, NKV, D] */
    const float *lse;               /* [N, NH] */
    /* [NH, padded_rows] lse in units of log2, and delta; infinity and 0 after row N - 1, so that p
     * and ds are 0 there. */
    float2 *stats;
    const int32_t *first, *end;
    int N, NH, NKV, D, group, padded_rows;
    int ld_dq, ld_dkv;       /* row strides */
    float scale, scale_log2; /* 1 / sqrt(D), and times log2(e) */
};

/* ---- attention_backward.cu ---- */

enum nb_status nbi_cuda_attention_bwd(struct nbi_stream *s, const struct nbi_op_attention_bwd *a);

/* ---- attention_backward_mma.cu ---- */

/* bf16, D 64 or 128; stats are complete. */
enum nb_status nbi_cuda_attention_bwd_mma(struct nbi_stream *s, const struct attention_bwd_args &a);
