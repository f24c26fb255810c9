/* kernels.h - the inner loops of the CPU backend, one table per instruction set.
 *
 * kernels_scalar.c is the definition. The others may round differently (they add in another order
 * and fuse), but each result depends on its own inputs alone: a row gives the same bits whichever
 * rows are computed beside it. */
#pragma once

#include "backend/backend.h"
#include "backend/cpu/tiles.h"
#include "base/sys.h"
#include "tensor/dtype.h"

#define NBI_KEY_BLOCK 64 /* keys that a softmax takes at a time */
#define NBI_QUERIES   64 /* queries that look at the same keys together, at most */
#define NBI_COLUMNS   8  /* rows of x that a product takes at a time */

_Static_assert(NBI_SHARED_MAX <= NBI_QUERIES, "the heads of one row fit");

/* Rows of queries against keys and values: in each row, the heads that share them. */
struct nbi_attend {
    float *y;             /* [rows, heads, D], ldq floats from row to row */
    float *lse;           /* [rows, heads], ld_lse floats from row to row; or NULL */
    const float *q;       /* as y */
    const uint8_t *k, *v; /* of the row `first` and this head */
    const int32_t
        *last; /* row r sees keys 0 to last[r] - first; no row fewer than the one before */
    int64_t first, stride, ldq, ld_lse; /* stride: bytes from one key to the next */
    enum nbi_dtype dtype;
    int rows, heads; /* rows * heads <= NBI_QUERIES */
    int64_t D;
    float *scratch; /* 64-byte aligned; nbi_attend_scratch floats */
};

static inline int64_t nbi_attend_scratch(int64_t D)
{
    return NBI_KEY_BLOCK * D + NBI_QUERIES * NBI_KEY_BLOCK;
}

/* The rotation of one position: [D/2] each. */
struct nbi_turn {
    const float *cos, *sin;
};

/* y[c * ldy + r] (+)= x[c] . row r of w, for `rows` <= 16 rows and n <= NBI_COLUMNS rows of x. */
struct nbi_product {
    float *y;
    int64_t ldy;
    const void *w;        /* one row of tiles, or rows of floats at any alignment */
    enum nbi_dtype dtype; /* of such floats */
    float scale;          /* tensor scale of tiles */
    const float *x;       /* [n] rows, ldx apart */
    int64_t ldx;
    const int16_t *q16;     /* or the same as whole numbers: a panel of n rows */
    const float *q16_scale; /* [blocks, n] */
    int64_t K;
    int rows, n;
    bool add;
};

struct nbi_cpu_kernels {
    const char *name;

    /* The products of the kinds that struct nbi_product names. */
    void (*tiles_exact)(const struct nbi_product *p);
    void (*tiles_q16)(const struct nbi_product *p);
    void (*rows_float)(const struct nbi_product *p);

    /* A row of a panel of n (tiles.h); q and scale point at its first values. */
    void (*quantize_q16)(int16_t *q, float *scale, int n, const float *x, int64_t K);

    void (*rmsnorm)(float *y, float *rstd, const float *x, const float *w, float eps, int64_t C);

    /* Norm and rotation of one head. */
    void (*norm_rope)(float *y, float *rstd, const float *x, const float *w, struct nbi_turn turn,
                      float eps, int64_t D);

    void (*attend)(const struct nbi_attend *a);
    void (*swiglu)(float *y, const float *gate, const float *up, int64_t n);

    /* n values to and from a store's type. */
    void (*narrow)(void *y, enum nbi_dtype dtype, const float *x, int64_t n);
    void (*widen)(float *y, const void *x, enum nbi_dtype dtype, int64_t n);

    int64_t (*argmax)(const float *x, int64_t n);
};

extern const struct nbi_cpu_kernels nbi_cpu_kernels_scalar;
#if defined(__x86_64__)
extern const struct nbi_cpu_kernels nbi_cpu_kernels_avx2, nbi_cpu_kernels_avx512;
#endif

/* NULL if this CPU or this build lacks it. */
const struct nbi_cpu_kernels *nbi_cpu_kernels_at(enum nbi_simd level);
