/* params.h - every parameter of a model, once: names, shape, place and treatment.
 *
 * Loading, training, checkpoints, export, verification and the names in both file formats walk this
 * table. To add a parameter, add a row (and its field in struct nbi_layer_weights).
 *
 * The order is that of a `.dat`. It also numbers the random streams of initialisation and
 * stochastic rounding, so it must not change. */
#pragma once

#include "model/config.h"

/* The length of a dimension. Columns of NBI_DIM_NONE: the parameter is a vector. */
enum nbi_dim {
    NBI_DIM_NONE,
    NBI_DIM_VOCAB,
    NBI_DIM_HIDDEN,
    NBI_DIM_FFN,
    NBI_DIM_Q,
    NBI_DIM_KV,
    NBI_DIM_HEAD
};

/* Runtimes fuse these into one matrix, so their NVFP4 tensors share one tensor scale. */
enum nbi_fuse { NBI_FUSE_NONE, NBI_FUSE_QKV, NBI_FUSE_GATE_UP };

/* Which models have the parameter. */
enum nbi_when { NBI_WHEN_ALWAYS, NBI_WHEN_UNTIED };

enum {
    NBI_QUANT = 1,  /* NVFP4 in a quantised model */
    NBI_DECAY = 2,  /* weight decay applies */
    NBI_GATHER = 4, /* read by row */
    NBI_MAY_TIE = 8 /* a tied model uses the embedding instead */
};

/* X(field, Hugging Face name, GGUF name, rows, columns, fuse, when, flags). Rows of a layer omit
 * the prefix of their names. */
#define NBI_PARAMS_BEFORE(X)                                                                       \
    X(embed, "model.embed_tokens.weight", "token_embd.weight", VOCAB, HIDDEN, NONE, ALWAYS,        \
      NBI_DECAY | NBI_GATHER)

#define NBI_PARAMS_OF_LAYER(X)                                                                     \
    X(q, "self_attn.q_proj.weight", "attn_q.weight", Q, HIDDEN, QKV, ALWAYS,                       \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(k, "self_attn.k_proj.weight", "attn_k.weight", KV, HIDDEN, QKV, ALWAYS,                      \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(v, "self_attn.v_proj.weight", "attn_v.weight", KV, HIDDEN, QKV, ALWAYS,                      \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(o, "self_attn.o_proj.weight", "attn_output.weight", HIDDEN, Q, NONE, ALWAYS,                 \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(q_norm, "self_attn.q_norm.weight", "attn_q_norm.weight", HEAD, NONE, NONE, ALWAYS, 0)        \
    X(k_norm, "self_attn.k_norm.weight", "attn_k_norm.weight", HEAD, NONE, NONE, ALWAYS, 0)        \
    X(gate, "mlp.gate_proj.weight", "ffn_gate.weight", FFN, HIDDEN, GATE_UP, ALWAYS,               \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(up, "mlp.up_proj.weight", "ffn_up.weight", FFN, HIDDEN, GATE_UP, ALWAYS,                     \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(down, "mlp.down_proj.weight", "ffn_down.weight", HIDDEN, FFN, NONE, ALWAYS,                  \
      NBI_QUANT | NBI_DECAY)                                                                       \
    X(input_norm, "input_layernorm.weight", "attn_norm.weight", HIDDEN, NONE, NONE, ALWAYS, 0)     \
    X(post_norm, "post_attention_layernorm.weight", "ffn_norm.weight", HIDDEN, NONE, NONE, ALWAYS, \
      0)

#define NBI_PARAMS_AFTER(X)                                                                        \
    X(norm, "model.norm.weight", "output_norm.weight", HIDDEN, NONE, NONE, ALWAYS, 0)              \
    X(head, "lm_head.weight", "output.weight", VOCAB, HIDDEN, NONE, UNTIED,                        \
      NBI_QUANT | NBI_DECAY | NBI_MAY_TIE)

#define NBI_PARAM_LIST(X) NBI_PARAMS_BEFORE(X) NBI_PARAMS_OF_LAYER(X) NBI_PARAMS_AFTER(X)

/* The index of a row: NBI_PARAM_embed, NBI_PARAM_q, ... */
enum nbi_param_id {
#define X(field, ...) NBI_PARAM_##field,
    NBI_PARAM_LIST(X)
#undef X
        NBI_PARAM_ID_COUNT
};

struct nbi_param_def {
    const char *name, *gguf; /* in a layer: after "model.layers.N." or "blk.N." */
    bool of_layer;
    enum nbi_dim rows, cols;
    enum nbi_fuse fuse;
    enum nbi_when when;
    unsigned flags;
    size_t weight, grad; /* offsets: in the structs of a layer, or in nbi_weights and nbi_grads */
};

extern const struct nbi_param_def nbi_param_defs[NBI_PARAM_ID_COUNT];

static inline const char *nbi_embedding_name(void)
{
    return nbi_param_defs[NBI_PARAM_embed].name;
}

static inline const char *nbi_head_name(void)
{
    return nbi_param_defs[NBI_PARAM_head].name;
}

#define NBI_PARAM_NAME_MAX 96

/* A parameter of a given model. */
struct nbi_param {
    char name[NBI_PARAM_NAME_MAX]; /* Hugging Face's */
    int ndim;
    int64_t shape[2]; /* shape[1] is 0 for a vector */
    int64_t layer;    /* -1: outside the layers */
    int64_t index;    /* in the order of the model */
    const struct nbi_param_def *def;
};

/* The parameters of a model in order: before the layers, layer by layer, after them. A tied model
 * counts no head. If its files hold one nevertheless, that has the index nbi_param_count(). */
int64_t nbi_param_count(const struct nbi_config *c);
int64_t nbi_params_per_layer(const struct nbi_config *c);
void nbi_param_at(const struct nbi_config *c, int64_t index, struct nbi_param *p);
void nbi_param_head(const struct nbi_config *c, struct nbi_param *p);

/* By Hugging Face name; false: the model has no such parameter. The head is always found. */
bool nbi_param_find(const struct nbi_config *c, const char *name, struct nbi_param *p);

/* The number of elements. */
int64_t nbi_param_values(const struct nbi_param *p);

/* Whether a stored tensor has the shape of p. */
bool nbi_param_fits(const struct nbi_param *p, const struct nbi_entry *e);

/* ---- its weight and its gradient (model/weights.h) ---- */

struct nbi_weights;
struct nbi_grads;

/* Like strchr(): the result may be written through if *w or *g may be. */
struct nbi_weight *nbi_param_weight(const struct nbi_weights *w, const struct nbi_param *p);
struct nbi_ptr *nbi_param_grad(const struct nbi_grads *g, const struct nbi_param *p);

/* ---- names, without a config ---- */

/* The row of a Hugging Face name, and its layer (-1: outside the layers). NULL: unknown. */
const struct nbi_param_def *nbi_param_parse(const char *name, int64_t *layer);
void nbi_param_name(char name[NBI_PARAM_NAME_MAX], enum nbi_param_id id, int64_t layer);

/* From Hugging Face's names to GGUF's and back; false: not the name of a parameter. */
bool nbi_param_to_gguf(const char *name, char *out, size_t size);
bool nbi_param_from_gguf(const char *gguf, char *out, size_t size);

/* "q_proj", ..., "lm_head"; "other" for anything but a projection. */
#define NBI_PARAM_FAMILY_MAX 32
void nbi_param_family(const char *name, char family[NBI_PARAM_FAMILY_MAX]);

/* Whether a tensor of this name and rank is a projection, which quantised models have in NVFP4. */
bool nbi_param_is_projection(const char *name, int ndim);
