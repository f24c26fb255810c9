/* stream.cuh - a queue of the device: its memory, and what it has still to do. */
#pragma once

#include <cuda_runtime.h>

extern "C" {
#include "backend/decode.h"
}

/* A list of operations, recorded; see graph.cu. */
#define NBI_GRAPHS_MAX 16

struct cached_graph {
    int64_t key[NBI_GRAPH_KEYS];
    int64_t used;         /* when, in calls of repeat; 0: never */
    bool tried;           /* to record it */
    cudaGraphExec_t exec; /* NULL: it was seen once, or cannot be recorded */
};

/* y[N, C] += parts[0] + ... of a product, which whoever needs y has to do first: each operation
 * begins with CU_HERE, or takes it along. */
struct splitk_partials {
    float *y;              /* NULL: nothing is */
    const float *partials; /* [split_k, N, C] */
    int split_k;
    int64_t N, C;
};

/* Norms and rotation of queries and keys, keys and values to the store. */
struct rope_args {
    float *q_out, *rstd_q, *rstd_k;
    void *k_store, *v_store;
    const float *q, *k, *v, *cos, *sin;
    const int32_t *kv_rows;
    const void *q_norm, *k_norm;
    enum nbi_dtype q_type, k_type, kv;
    float eps;
    int NH, NKV, D;
    int N; /* 0: nothing to do */
};

/* x[N, K] of a product is in x16 already, from the operation right before it. */
struct packed_x {
    const float *x; /* NULL: it is not */
    int64_t N, K;
};

/* The best of one row of logits is the largest of some keys, from the operation right before. */
struct argmax_keys {
    const float *logits; /* NULL: it is not known */
    int64_t V;
    const uint64_t *keys;
    int count;
};

/* Bytes that come to pinned memory first and go to their place at the next sync. */
#define NBI_DOWNLOADS_MAX 4

struct download {
    void *to;
    const void *from;
    int64_t bytes;
};

struct nbi_stream {
    struct cuda *cuda;
    cudaStream_t queue;
    struct nbi_stream_limits limits;
    uint8_t *block;     /* of the device: all that follows */
    uint8_t *x_f16;     /* x of a product: 16 bits, in order of the tiles or rows; or two terms */
    float *x_f16_scale; /* [N] */
    uint8_t *act_f16;   /* the same of SwiGLU, up to NBI_DECODE_LINEAR_ROWS rows */
    float *act_f16_scale;
    uint8_t *weights_bf16;       /* rows of a matrix as bf16, NBI_WEIGHTS_BF16_BYTES of them */
    uint8_t *workspace;          /* of cuBLASLt; of linear_few.cu, what is pending */
    float *attention_partials;   /* parts of split attention */
    int32_t *attention_counters; /* and how many of each row were left, see attention.cuh */
    uint8_t *upload;             /* of the host, pinned: small uploads on their way */
    int64_t upload_used;         /* since the last sync */
    struct download downloads[NBI_DOWNLOADS_MAX]; /* small downloads that are there too */
    int download_count;
    struct splitk_partials pending;
    struct packed_x ready;
    struct packed_x acted; /* the same in act_f16: SwiGLU of the product right before */
    struct argmax_keys best;
    struct rope_args rope; /* to be done before anything else */
    struct cached_graph graphs[NBI_GRAPHS_MAX];
    int64_t graph_clock; /* calls of repeat */
};
