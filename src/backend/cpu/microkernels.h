/* microkernels.h - the inner loops of the CPU backend, one table per instruction set.
 *
 * kernels_scalar.c is the definition. The others may round differently (they add in another order
 * and fuse), but each result depends on its own inputs alone: a row gives the same bits whichever
 * rows are computed beside it. */
#pragma once

#include "backend/cpu/nvfp4_tile.h"
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "base/sys.h"
#include "tensor/dtype.h"

#define NBI_KEY_BLOCK    64 /* keys that a softmax takes at a time */
#define NBI_QUERY_BLOCK  64 /* queries that look at the same keys together, at amax */
#define NBI_X_PANEL_ROWS 8  /* rows of x that a product takes at a time */

_Static_assert(NBI_SHARED_MAX <= NBI_QUERY_BLOCK, "the heads of one row fit");

/* Rows of queries against keys and values: in each row, the heads that share them. */
struct nbi_attention_tile {
    float *y;             /* [rows, heads, D], ldq floats from row to row */
    float *lse;           /* [rows, heads], ld_lse floats from row to row; or NULL */
    const float *q;       /* as y */
    const uint8_t *k, *v; /* of this head and the row `first`; with pages, of row 0 of the store */
    const int32_t *pages; /* from that of the row `first` on; or NULL */
    const int32_t
        *last; /* row r sees keys 0 to last[r] - first; no row fewer than the one before */
    int64_t first, stride, ldq, ld_lse; /* stride: bytes from one key to the next */
    enum nbi_dtype dtype;
    int rows, heads; /* rows * heads <= NBI_QUERY_BLOCK */
    int64_t D;
    float *scratch; /* 64-byte aligned; nbi_attention_floats floats */
};

_Static_assert(NBI_KEY_BLOCK == NBI_PAGE, "the keys of a block lie together");

/* Where the block of keys or values that begins at `start` is, counted from the row `first`. */
static inline const uint8_t *nbi_attention_kv_block(const struct nbi_attention_tile *a,
                                                    const uint8_t *p, int64_t start)
{
    return p + (a->pages ? (int64_t)a->pages[start / NBI_PAGE] * NBI_PAGE : start) * a->stride;
}

static inline int64_t nbi_attention_floats(int64_t D)
{
    return NBI_KEY_BLOCK * D + NBI_QUERY_BLOCK * NBI_KEY_BLOCK;
}

/* The rotation of one position: [D/2] each. */
struct nbi_rope_row {
    const float *cos, *sin;
};

/* y[c * ldy + r] (+)= x[c] . row r of w, for `rows` <= 16 rows and n <= NBI_X_PANEL_ROWS rows of x,
 * or any number of them with floats. */
struct nbi_dot_tile {
    float *y;
    int64_t ldy;
    const void *w;        /* one row of tiles, or rows of floats at any alignment, ldw apart */
    enum nbi_dtype dtype; /* of such floats */
    int64_t ldw;
    float scale;    /* tensor scale of tiles */
    const float *x; /* [n] rows, ldx apart */
    int64_t ldx;
    const int16_t *x_i16;     /* or the same as whole numbers: a panel of n rows */
    const float *x_i16_scale; /* [blocks, n] */
    int64_t K;
    int rows, n;
    bool add;
};

/* What a piece of a gradient adds to nbi_op_grad_stats. */
struct nbi_grad_partial {
    double squares;
    float amax;
    int64_t nonfinite;
};

/* c [mr, nr] (+)= the sum over i < k of column i of a times row i of b, from front to back. */
struct nbi_gemm_tile {
    float *c;
    int64_t ldc;
    const float *a;
    int64_t a_row, a_col; /* element (m, i) of a is at m * a_row + i * a_col */
    const float *b;
    int64_t ldb, k;
    bool add;
};

#define NBI_GEMM_TILE_MAX (12 * 32) /* mr * nr at amax; both divide 96, and nr is 16 or 32 */

/* Elements (r, c) of a matrix, at r * row + c * col. */
struct nbi_strided {
    int64_t rows, cols, row, col;
};

/* Of n scores and of the gradients of their probabilities, the probabilities and the gradients of
 * the unscaled scores, in place. */
struct nbi_softmax_bwd {
    float *p, *ds;
    const float *lse, *delta; /* of each score, or one for all of them */
    bool each;
    float scale; /* of scores */
    int64_t n;   /* a multiple of 16 */
};

struct nbi_microkernels {
    const char *name;
    int mr, nr; /* of `gemm_tile` */

    /* The products of the kinds that struct nbi_dot_tile names. */
    void (*tiles_exact)(const struct nbi_dot_tile *p);
    void (*tiles_x_i16)(const struct nbi_dot_tile *p);
    void (*rows_float)(const struct nbi_dot_tile *p);

    /* A row of a panel of n (tiles.h); q and scale point at its first values. */
    void (*quantize_x_i16)(int16_t *q, float *scale, int n, const float *x, int64_t K);

    void (*rmsnorm)(float *y, float *rstd, const float *x, const float *w, float eps, int64_t C);

    /* Norm and rotation of one head. */
    void (*norm_rope)(float *y, float *rstd, const float *x, const float *w,
                      struct nbi_rope_row rope, float eps, int64_t D);

    void (*attention)(const struct nbi_attention_tile *a);
    void (*swiglu)(float *y, const float *gate, const float *up, int64_t n);

    /* n values to and from a store's type. */
    void (*from_f32)(void *y, enum nbi_dtype dtype, const float *x, int64_t n);
    void (*to_f32)(float *y, const void *x, enum nbi_dtype dtype, int64_t n);

    int64_t (*argmax)(const float *x, int64_t n);

    /* Of n elements; the same bits in every table, as adamw. */
    void (*grad_stats)(struct nbi_grad_partial *out, const float *x, int64_t n);

    /* The operation on elements [first, first + count); peak becomes the larger of itself and what
     * there is. */
    void (*adamw)(const struct nbi_op_adamw *a, int64_t first, int64_t count, float peak[2]);
    /* y = e^(x - max), and their sum. NaN stays. */
    float (*exp_sum)(float *y, const float *x, float max, int64_t n);

    /* Backward. Those of norms work on one row; dx and dw are added to, d is replaced. */
    void (*gemm_tile)(const struct nbi_gemm_tile *t);
    void (*pack)(float *y, int64_t ldy, const float *x, struct nbi_strided at,
                 float by); /* y = by x^T */
    /* A tile's values without the tensor scale: columns 0 to 15 to `low`, 16 to 31 to `high`. */
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
