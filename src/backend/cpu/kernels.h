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
#define NBI_COLUMNS   8  /* rows of x that a product takes at a time */

/* One query row against keys and values: heads that share them. */
struct nbi_attend {
    float *y;             /* [heads, D] */
    float *lse;           /* [heads], or NULL */
    const float *q;       /* [heads, D] */
    const uint8_t *k, *v; /* of the row `first` and this head */
    int64_t stride;       /* bytes from one row to the next */
    enum nbi_dtype dtype;
    int64_t count; /* rows */
    int heads;
    int64_t D;
    float *scratch; /* 64-byte aligned; nbi_attend_scratch floats */
};

static inline int64_t nbi_attend_scratch(int heads, int64_t D)
{
    return NBI_KEY_BLOCK * D + (int64_t)heads * NBI_KEY_BLOCK;
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
    const struct nbi_q15_block *q15; /* or the same as integers, all blocks of a row together */
    int64_t K;
    int rows, n;
    bool add;
};

struct nbi_cpu_kernels {
    const char *name;

    /* The products of the kinds that struct nbi_product names. */
    void (*tiles_exact)(const struct nbi_product *p);
    void (*tiles_q15)(const struct nbi_product *p);
    void (*rows_float)(const struct nbi_product *p);

    /* Blocks of 32, the last one filled with zeros. */
    void (*quantize_q15)(struct nbi_q15_block *out, const float *x, int64_t K);

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
