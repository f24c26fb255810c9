/* decode.h - what a backend may offer for decoding: CUDA graphs, a megakernel for single tokens,
 * and running ahead of the host.
 *
 * All of it is optional (enum nbi_cap). Without, the caller queues the operations of ops.h instead,
 * which give the same results up to rounding. Calls are asynchronous unless they say otherwise. */
#pragma once

#include "backend/ops.h"

/* ---- graphs ---- */

#define NBI_GRAPH_KEYS 12

/* A list of operations that recurs with other values at the same addresses.
 *
 * graph_run queues the list in stream order. A list whose key it has seen before may have been
 * recorded and may then be launched without calling `queue`. Recordings take memory, the only
 * memory that a stream takes after stream_new; their number is bounded. */
struct nbi_graph {
    int64_t key[NBI_GRAPH_KEYS];        /* everything that decides which operations run, and their
                                         * arguments */
    enum nb_status (*queue)(void *ctx); /* queues the operations, and calls nothing else */
    void *ctx;
};

/* ---- the megakernel ---- */

/* A model of Qwen3's architecture, and the KV cache that its layers write to.
 *
 * megakernel_new copies the arrays; weights and cache must outlive the megakernel. It returns
 * NB_EUNSUPPORTED if this model cannot run on this device. megakernel_free must be called with no
 * work in flight, and may be called after stream_free. */
struct nbi_megakernel_model {
    int64_t layers, C, F, NH, NKV, D, V;
    const struct nbi_layer_weights *layer; /* host [layers] */
    const struct nbi_kv_view *kv;          /* host [layers] */
    struct nbi_weight embed, norm, head;
    struct nbi_ptr frequency; /* as in nbi_op_rope_table */
    float rope_scale, eps;
};

/* megakernel_run computes embedding, all layers and head for one token, as the operations do
 * with NBI_MATMUL_FAST, up to rounding. What is added to the residual stream may be summed in a
 * fixed point of +-2^19; beyond that the result is NaN. */
struct nbi_megakernel_step {
    int32_t id, position, kv_row, first, last;
    struct nbi_ptr logits; /* [V] */
};

/* ---- running ahead ---- */

/* How one of the most likely tokens is drawn (infer/sampler.c): each has the weight
 * unit * e^((logit - largest logit) * inv_temperature), and top-p and min-p cut off the tail. */
struct nbi_draw {
    double inv_temperature;
    double unit; /* the weight of the most likely token; a power of two */
    double top_p, log_min_p;
    uint64_t uniform; /* the random number, a fraction of 2^64 */
};

/* megakernel_run_ahead picks a token from the logits of the megakernel's last run, and queues a run
 * of it; the id in its step is ignored. It returns as soon as the candidates are known, while that
 * run may still be at work. The token is the most likely one if k is 1, else the one that `draw`
 * gives, up to rounding: the host draws for itself and repeats the step if the two differ. */
struct nbi_run_ahead {
    int64_t k; /* 1 to NBI_TOPK_MAX */
    struct nbi_draw draw;
    struct nbi_ptr topk; /* if k > 1: what nbi_op_topk made of those logits, in one block:
                          * nonfinite [1], ids [k], values [k] */
    struct nb_candidate candidates[NBI_TOPK_MAX]; /* out: the k most likely, in descending order */
    int32_t id;                                   /* out: the token that runs */
    bool nonfinite; /* out: a logit was NaN or infinity; the other results are undefined */
};
