/* weight.h - addresses in a backend's memory, and the weights that lie there. */
#pragma once

#include "tensor/dtype.h"

struct nbi_backend;

/* ---- memory ---- */

/* An address in a backend's memory; 0 is none. A struct, so that host code cannot dereference it.
 */
struct nbi_ptr {
    uintptr_t at;
};

static inline struct nbi_ptr nbi_ptr_add(struct nbi_ptr p, int64_t bytes)
{
    return (struct nbi_ptr){p.at + (uintptr_t)bytes};
}

/* ---- weights ---- */

/* How a backend keeps a matrix. The backend chooses, except where a contract demands ROWS. */
enum nbi_weight_layout {
    NBI_WEIGHT_ROWS,  /* floats, row-major as stored */
    NBI_WEIGHT_TILES, /* NVFP4, repacked for the product; the layout is the backend's own */
    /* NVFP4 without codes: block scales [O, K/16] as stored. The codes follow from them and from
     * the master, which must be the one that the scales were made from, and each operation makes
     * them anew. For linear, linear_bwd, requantize, adamw and weight_read; the bits are those of
     * TILES. */
    NBI_WEIGHT_SCALES
};

/* A matrix [O, K] or a vector [O]. */
struct nbi_weight {
    enum nbi_dtype dtype; /* f32, f16, bf16 or NVFP4 */
    enum nbi_weight_layout layout;
    int64_t rows, cols; /* cols 0: a vector */
    struct nbi_ptr data;
    struct nbi_ptr scales, master; /* NBI_WEIGHT_SCALES, instead of data; the caller's master */
    enum nbi_dtype master_dtype;   /* f32 or bf16 */
    /* [rows, cols] the values of an NVFP4 matrix in bf16, without the tensor scale; or none. */
    struct nbi_ptr bf16;
    float tensor_scale; /* NVFP4; 1 otherwise */
    bool borrowed;      /* its memory is the caller's; weight_free leaves it */
};

/* Memory of the caller for a weight, 64-byte aligned: weight_bytes() for its data, or for scales
 * only rows cols / 16; if it has a copy in bf16, 2 rows cols for that. */
struct nbi_weight_memory {
    struct nbi_ptr data, bf16;
};

/* Whether w has memory of its own or borrows it: it is not zeroed. */
static inline bool nbi_weight_exists(const struct nbi_weight *w)
{
    return w->data.at || w->scales.at;
}

#define NBI_ROWS_AT 16 /* see weight_rows */

/* Where weight_new gets a weight's values. */
struct nbi_weight_source {
    enum nbi_dtype dtype;
    int64_t rows, cols;
    float tensor_scale;
    /* Writes rows [first, first + count) to host memory: floats to data, or codes to data and
     * scales to scales. Several threads may call it at once. */
    enum nb_status (*read)(void *ctx, int64_t first, int64_t count, void *data, void *scales);
    void *ctx;
    bool lookup; /* only embed reads it, a few rows at a time: it may stay in host memory */
    const struct nbi_weight_memory *memory; /* where it goes; NULL: as the backend likes */
};

/* The weights of one transformer layer. */
struct nbi_layer_weights {
    struct nbi_weight input_norm, post_norm, q_norm, k_norm;
    struct nbi_weight q, k, v, o, gate, up, down;
};
