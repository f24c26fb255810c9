/* microkernels.h - the inner loops of the CPU backend, one table of functions per instruction set.
 *
 * microkernels_scalar.c is the definition. The others may round differently (they fuse
 * multiply-adds and sum in another order), but a result depends on its own inputs alone: a row
 * gives the same bits whichever rows are computed in the same call. */
#pragma once

#include "backend/cpu/nvfp4_tile.h"
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "base/sys.h"
#include "tensor/dtype.h"

#define NBI_KEY_BLOCK    64 /* keys per block of the online softmax */
#define NBI_QUERY_BLOCK  64 /* limit of queries that read the same keys in one call */
#define NBI_X_PANEL_ROWS 8  /* limit of rows of x in one call on tiles */

_Static_assert(NBI_SHARED_MAX <= NBI_QUERY_BLOCK, "the heads of one row fit");

/* Attention of `rows` rows, each with the `heads` query heads that share one key head, over the
 * same keys and values. */
struct nbi_attention_tile {
    float *y;             /* [rows, heads, D]; rows ldq floats apart */
    float *lse;           /* [rows, heads], rows ld_lse floats apart; or NULL */
    const float *q;       /* laid out as y */
    const uint8_t *k, *v; /* of this key head, at row `first` of kv; with pages, at row 0 */
    const int32_t *pages; /* page numbers, starting with the page of row `first`; or NULL */
    const int32_t *last;  /* row r sees keys 0 to last[r] - first, never fewer than row r - 1 */
    int64_t first, stride, ldq, ld_lse; /* stride: bytes from one key to the next */
    enum nbi_dtype dtype;
    int rows, heads; /* rows * heads <= NBI_QUERY_BLOCK */
    int64_t D;
    float *scratch; /* 64-byte aligned; nbi_attention_floats floats */
};

_Static_assert(NBI_KEY_BLOCK == NBI_PAGE, "the keys of a block lie together");

/* The block of NBI_KEY_BLOCK keys or values that begins `start` rows after `first`. */
static inline const uint8_t *nbi_attention_kv_block(const struct nbi_attention_tile *a,
                                                    const uint8_t *p, int64_t start)
{
    return p + (a->pages ? (int64_t)a->pages[start / NBI_PAGE] * NBI_PAGE : start) * a->stride;
}

static inline int64_t nbi_attention_floats(int64_t D)
{
    return NBI_KEY_BLOCK * D + NBI_QUERY_BLOCK * NBI_KEY_BLOCK;
}

/* cos and sin of one position, [D/2] each. */
struct nbi_rope_row {
    const float *cos, *sin;
};

/* y[c * ldy + r] = dot(x[c], w[r]), or y + that with add, for rows <= 16 rows of w. n is at most
 * NBI_X_PANEL_ROWS, and unlimited for a w of floats. */
struct nbi_dot_tile {
    float *y;
    int64_t ldy;
    /* One row of tiles, or `rows` rows of floats, ldw values apart, at any alignment. */
    const void *w;
    enum nbi_dtype dtype; /* of w, if floats */
    int64_t ldw;
    float scale;    /* tensor scale of tiles */
    const float *x; /* [n, K], rows ldx apart */
    int64_t ldx;
    const int16_t *x_i16;     /* instead of x: a panel of n rows (nvfp4_tile.h) */
    const float *x_i16_scale; /* [blocks, n] */
    int64_t K;
    int rows, n;
    bool add;
};

/* The contribution of a range of elements to nbi_op_grad_stats. */
struct nbi_grad_partial {
    double squares;
    float amax;
    int64_t nonfinite;
};

/* An AdamW operation, and what its control and record say. */
struct nbi_adamw_args {
    const struct nbi_op_adamw *op;
    float grad_scale, m_scale[2], v_scale[2];
};

/* c [mr, nr] = sum over i < k of a[:, i] * b[i, :], or c + that with add; summed in the order of i.
 */
struct nbi_gemm_tile {
    float *c;
    int64_t ldc;
    const float *a;
    int64_t a_row, a_col; /* element (m, i) of a is at m * a_row + i * a_col */
    const float *b;
    int64_t ldb, k;
    bool add;
};

#define NBI_GEMM_MR_MAX   12
#define NBI_GEMM_TILE_MAX (12 * 32) /* largest mr * nr; mr and nr divide 96, and nr is 16 or 32 */

/* A matrix view: element (r, c) is at r * row + c * col. */
struct nbi_strided {
    int64_t rows, cols, row, col;
};

/* In place, for n scores before scaling and the gradients of their probabilities:
 *   p = e^(p * scale - lse);  ds = p * (ds - delta) * scale. */
struct nbi_softmax_bwd {
    float *p, *ds;
    const float *lse, *delta; /* one per score if `each` is set, else one for all */
    bool each;
    float scale; /* of scores */
    int64_t n;   /* a multiple of 16 */
};

struct nbi_microkernels {
    const char *name;
    int mr, nr; /* of gemm_tile */

    /* nbi_dot_tile with f32 x and tiles, with 16-bit integer x and tiles, with f32 x and floats. */
    void (*tiles_exact)(const struct nbi_dot_tile *p);
    void (*tiles_x_i16)(const struct nbi_dot_tile *p);
    void (*rows_float)(const struct nbi_dot_tile *p);

    /* Converts one row of a panel of n rows (nvfp4_tile.h). q and scale point at the row's first
     * values in the panel. */
    void (*quantize_x_i16)(int16_t *q, float *scale, int n, const float *x, int64_t K);

    void (*rmsnorm)(float *y, float *rstd, const float *x, const float *w, float eps, int64_t C);

    /* RMSNorm and rotation of one head. */
    void (*norm_rope)(float *y, float *rstd, const float *x, const float *w,
                      struct nbi_rope_row rope, float eps, int64_t D);

    void (*attention)(const struct nbi_attention_tile *a);
    void (*swiglu)(float *y, const float *gate, const float *up, int64_t n);

    /* Converts n values from and to f32. from_f32 rounds to nearest. */
    void (*from_f32)(void *y, enum nbi_dtype dtype, const float *x, int64_t n);
    void (*to_f32)(float *y, const void *x, enum nbi_dtype dtype, int64_t n);

    int64_t (*argmax)(const float *x, int64_t n);

    /* The next two give the same bits in every table. grad_stats of n elements: */
    void (*grad_stats)(struct nbi_grad_partial *out, const void *grad, bool bf16, int64_t n);

    /* The operation on elements [first, first + count). Raises running_max[0] to the largest |m|,
     * and running_max[1] to the largest sqrt(v). */
    void (*adamw)(const struct nbi_adamw_args *a, int64_t first, int64_t count,
                  float running_max[2]);
    /* y = e^(x - max); returns their sum. A NaN stays a NaN. */
    float (*exp_sum)(float *y, const float *x, float max, int64_t n);

    /* Backward. The functions for norms take one row or head; dx and dw are added to, d is
     * replaced. */
    void (*gemm_tile)(const struct nbi_gemm_tile *t);
    void (*pack)(float *y, int64_t ldy, const float *x, struct nbi_strided at,
                 float by); /* y[c * ldy + r] = by * x(r, c) */
    /* The values of a tile without the tensor scale: columns 0 to 15 to `low`, 16 to 31 to `high`,
     * rows ld floats apart. */
    void (*tile_to_f32)(float *low, float *high, int64_t ld, const uint8_t *tile);
    void (*rmsnorm_bwd)(float *dx, const float *dy, const float *x, const float *w, float rstd,
                        int64_t C);
    void (*norm_rope_bwd)(float *d, float *dw, const float *x, const float *w,
                          struct nbi_rope_row rope, float rstd, int64_t D);
    void (*swiglu_bwd)(float *dgate, float *dup, const float *dy, const float *gate,
                       const float *up, int64_t n);
    void (*softmax_bwd)(const struct nbi_softmax_bwd *a);
};

extern const struct nbi_microkernels nbi_microkernels_scalar;
#if defined(__x86_64__)
extern const struct nbi_microkernels nbi_microkernels_avx2, nbi_microkernels_avx512;
#endif

/* NULL if this CPU or this build lacks it. */
const struct nbi_microkernels *nbi_microkernels_at(enum nbi_simd level);
