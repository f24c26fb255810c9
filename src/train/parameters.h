/* parameters.h - the parameters of a model in training.
 *
 * Each trained parameter has a master, which accumulates updates, two moments and a gradient. The
 * forward pass sees a weight made from the master: NVFP4 for projections in that precision, floats
 * of the type that will be written otherwise. So what is exported is what was trained with, bit for
 * bit. A parameter that is not trained is kept as it is stored.
 *
 * If NVFP4 tensors of the source have tensor scales, those that are trained have them too: that of
 * the source, doubled as often as the masters outgrow it, or where there is none the one that
 * quantising would choose. Tensors that runtimes fuse (q, k, v; gate, up) share theirs. */
#pragma once

#include "backend/ops_train.h"
#include "formats/store.h"
#include "model/transformer.h"

struct nbi_train_param {
    struct nbi_param param;
    int64_t index;                   /* in the list of the config's parameters */
    int64_t count, layer;            /* elements; -1: of no layer */
    bool trained;                    /* else nothing below is set but what is said to be written */
    struct nbi_train_param *tied_to; /* the head of a tied model: its master and gradient are those
                                  of the embedding */
    struct nbi_ptr master;
    enum nbi_dtype dtype; /* of the master: f32 or bf16 */
    struct nbi_ptr grad;  /* f32 */
    struct nbi_moment m, v;
    float m_scale, v_scale;    /* nvfp4 moments: of the tensor; 0: fresh */
    float m_max, v_max;        /* largest |m| and sqrt(v) stored */
    struct nbi_weight *weight; /* of the forward pass */
    /* What is written. */
    bool quantized;            /* NVFP4; else floats of type raw */
    enum nbi_dtype float_type; /* of floats */
    bool has_tensor_scale;     /* NVFP4 with a tensor scale, which the weight has */
    float divisor;             /* the reciprocal of that as the source stores it; 0: it does not */
};

struct nbi_train_params_opts {
    enum nb_precision precision;
    enum nbi_dtype master; /* of matrices; vectors are f32 */
    enum nb_moment_type moment_type;
    int64_t last_layers;     /* only so many, and the final norm; 0: everything */
    bool update_in_backward; /* one layer's gradients at a time */
    uint64_t seed;           /* without a store: of random values */
    enum nbi_format target;  /* what will be written decides the types of floats */
};

struct nbi_train_params {
    struct nbi_backend *be;
    struct nbi_train_params_opts opts;
    const struct nbi_config *config; /* borrowed */
    struct nbi_store *store;         /* borrowed; NULL: random */
    struct nbi_stream *stream;       /* borrowed */
    struct nbi_weights weights;
    struct nbi_train_param *tensors; /* in the order of the config's parameters, a tied head last */
    int64_t count;
    struct nbi_grads grads;
    int64_t first_layer;
    bool has_tensor_scale; /* what is trained in NVFP4 gets tensor scales */
    struct nbi_ptr amax;   /* then f32 [count]: largest magnitudes of masters */
    float *host_amax;
};

/* Parameter i as it will be, before anything is allocated; false: there are no more. shares is not
 * set. */
bool nbi_train_params_at(const struct nbi_config *c, const struct nbi_store *store,
                         const struct nbi_train_params_opts *opts, int64_t i,
                         struct nbi_train_param *out);

/* The first layer that is trained, of the last so many; 0: all are. */
static inline int64_t nbi_first_layer(const struct nbi_config *c, int64_t last_layers)
{
    return last_layers > 0 && last_layers < c->layers ? c->layers - last_layers : 0;
}

/* What it takes, by part; exactly what nbi_train_params_init asks the backend for. */
struct nbi_train_params_plan {
    int64_t masters, moments, gradients, weights;
};

void nbi_train_params_plan(const struct nbi_config *c, const struct nbi_store *store,
                           const struct nbi_train_params_opts *opts,
                           struct nbi_train_params_plan *plan);

/* The stream is used for loading; the store must outlive the result. */
enum nb_status nbi_train_params_init(struct nbi_train_params *t, struct nbi_stream *stream,
                                     struct nbi_backend *be, const struct nbi_config *c,
                                     struct nbi_store *store,
                                     const struct nbi_train_params_opts *opts);
void nbi_train_params_release(struct nbi_train_params *t);

/* The weights of the forward pass anew from the masters: all of them, or those of one layer. */
enum nb_status nbi_train_params_requantize(struct nbi_train_params *t, int64_t layer);

#define NBI_ALL_LAYERS (-2)

/* The same model with the masters themselves as weights, for evaluation; shares everything. Only
 * `layers` must be freed. */
enum nb_status nbi_train_params_masters(const struct nbi_train_params *t, struct nbi_weights *out);
