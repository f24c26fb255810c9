/* parameters.h - the parameters of a model in training.
 *
 * Each trained parameter has a master, two moments and a gradient. Updates go to the master. The
 * forward pass uses a weight made from it: NVFP4 for projections with that precision, otherwise
 * floats of the type that will be written. The result is therefore written with exactly the bits
 * that the last forward pass used. A parameter that is not trained keeps its stored type.
 *
 * If NVFP4 tensors of the source have tensor scales, so do the trained ones: the source's scale,
 * doubled whenever the masters outgrow it, or for a tensor without one the scale that quantizing
 * would choose. Tensors that runtimes fuse (q, k, v; gate, up) share one scale. */
#pragma once

#include "backend/ops_train.h"
#include "formats/store.h"
#include "model/transformer.h"

/* Each kind of array is one block of the backend's memory. */
#define NBI_PARAM_BLOCK_LIST(X)                                                                    \
    X(NBI_BLOCK_MASTERS, "masters")                                                                \
    X(NBI_BLOCK_MOMENTS, "moments")                                                                \
    X(NBI_BLOCK_GRADIENTS, "gradients")                                                            \
    X(NBI_BLOCK_WEIGHTS, "weights")                                                                \
    X(NBI_BLOCK_COPIES, "weights in bf16")

enum nbi_param_block { NBI_PARAM_BLOCK_LIST(NB_ENUMERATOR) NBI_PARAM_BLOCKS };

struct nbi_train_param {
    struct nbi_param param;
    int64_t index;                   /* in the order of a .dat; selects the random bits */
    int64_t count;                   /* elements */
    int64_t layer;                   /* -1: in no layer */
    bool trained;                    /* if not, only its weight and the last group are set */
    struct nbi_train_param *tied_to; /* the embedding, for the head of a tied model, which uses its
                                        master and gradient; otherwise NULL */
    struct nbi_ptr master;
    enum nbi_dtype dtype; /* of the master: f32 or bf16 */
    struct nbi_ptr grad;
    bool grad_bf16;     /* else f32 */
    int64_t slice_rows; /* rows of grad, which slices take in turn; 0: all */
    struct nbi_moment m, v;
    struct nbi_weight *weight;       /* of the forward pass */
    struct nbi_weight_memory memory; /* its part of the blocks; unused if it is the master */
    bool on_host;        /* instead: the embedding of a backend with memory of its own */
    bool made_by_update; /* it is made by adamw; nbi_optimizer_init decides */
    /* How the parameter is written: */
    bool quantized;            /* NVFP4, otherwise floats */
    enum nbi_dtype float_type; /* if not quantized */
    bool has_tensor_scale;     /* NVFP4 with a tensor scale, that of the weight */
    float divisor;             /* the scale's reciprocal as the source stores it; 0: it does not */
};

struct nbi_train_params_opts {
    enum nb_precision precision;
    enum nbi_dtype master; /* of matrices; vectors are always f32 */
    enum nb_moment_type moment_type;
    enum nb_weight_store weight_store; /* of NVFP4 */
    int64_t last_layers;               /* train only these and the final norm; 0: everything */
    bool
        update_in_backward; /* gradients of one layer at a time, updated inside the backward pass */
    bool bf16_grads;        /* of matrices of layers; for passes in bf16 that do not accumulate */
    int64_t slice_rows; /* with update_in_backward: of gradients of embedding and head; 0: all */
    uint64_t seed;      /* of random values, without a store */
    bool draw;          /* matrices of random values are made by the backend (nbi_op_draw) */
    int threads;        /* that read values, or draw them; 0: as many as this process may use */
    enum nbi_format target;  /* what will be written; decides the types of floats */
    nb_progress_fn progress; /* parameters loaded; may be NULL */
    void *progress_ctx;
};

struct nbi_train_params {
    struct nbi_backend *be;
    struct nbi_train_params_opts opts;
    const struct nbi_config *config; /* borrowed */
    struct nbi_store *store;         /* borrowed; NULL: random values */
    struct nbi_stream *stream;       /* borrowed */
    struct {
        struct nbi_ptr at;
        int64_t bytes;
    } blocks[NBI_PARAM_BLOCKS];
    int64_t host_bytes;  /* of weights that are not in the blocks */
    int64_t slice_bytes; /* of gradients of a slice of embedding and head */
    struct nbi_weights weights;
    struct nbi_train_param *tensors; /* in the order of the config's parameters, a tied head last */
    int64_t count;
    struct nbi_grads grads;
    int64_t first_layer;   /* trained */
    bool has_tensor_scale; /* of trained NVFP4 tensors */
    struct nbi_ptr amax;   /* f32 [count] of masters; only with tensor scales */
    float *host_amax;
    struct {
        float *f32;
        uint16_t *bf16;
        int64_t values; /* of each */
        int threads;
    } staging; /* of masters, while they are read */
};

/* Parameter i as nbi_train_params_init would describe it, without allocating anything; tied_to is
 * not set. false: there is no parameter i. */
bool nbi_train_params_at(const struct nbi_config *c, const struct nbi_store *store,
                         const struct nbi_train_params_opts *opts, int64_t i,
                         struct nbi_train_param *out);

/* The first trained layer if only the last ones are trained; 0: all are. */
static inline int64_t nbi_first_layer(const struct nbi_config *c, int64_t last_layers)
{
    return last_layers > 0 && last_layers < c->layers ? c->layers - last_layers : 0;
}

/* Exactly the bytes that nbi_train_params_init asks the backend for, and those of weights that stay
 * in the host's memory. Needs no more of the backend than weight_bytes and capabilities. */
struct nbi_train_params_plan {
    int64_t blocks[NBI_PARAM_BLOCKS], amax, host;
    int64_t tensors; /* t->count */
    int64_t slices;  /* nbi_slice_count() */
};

void nbi_train_params_plan(struct nbi_backend *be, const struct nbi_config *c,
                           struct nbi_store *store, const struct nbi_train_params_opts *opts,
                           struct nbi_train_params_plan *plan);

/* Loads or initializes all parameters through the stream. config, store, stream and backend must
 * outlive t. */
enum nb_status nbi_train_params_init(struct nbi_train_params *t, struct nbi_stream *stream,
                                     struct nbi_backend *be, const struct nbi_config *c,
                                     struct nbi_store *store,
                                     const struct nbi_train_params_opts *opts);
void nbi_train_params_release(struct nbi_train_params *t);

#define NBI_ALL_LAYERS (-2)

/* Rows of a slice of the vocabulary: gradients take 80 MiB in 4B. */
#define NBI_SLICE_ROWS 8192

/* Slices of embedding and head; 0: they are not updated in slices. */
static inline int64_t nbi_slice_count(const struct nbi_config *c, int64_t slice_rows)
{
    return slice_rows > 0 ? (c->vocab_size + slice_rows - 1) / slice_rows : 0;
}

/* Whether an update of the parameter can make its weight: it is made from this master alone, and
 * has no tensor scale that must be found first. */
bool nbi_train_param_allows_fusing(const struct nbi_train_param *x);

/* Computes the weights of the forward pass from the masters: those of one layer, of the
 * parameters in no layer (-1), or all (NBI_ALL_LAYERS). */
enum nb_status nbi_train_params_requantize(struct nbi_train_params *t, int64_t layer);

/* The same after an update, without the weights that it has made. */
enum nb_status nbi_train_params_requantize_rest(struct nbi_train_params *t, int64_t layer);

/* The model with its masters as weights, for evaluation. Borrows everything from t but
 * out->layers, which the caller frees. */
enum nb_status nbi_train_params_masters(const struct nbi_train_params *t, struct nbi_weights *out);
