/* config.h - the sizes of a dense Qwen3.
 *
 * A config is checked once, when it is read: from Hugging Face's config.json (with rope_theta as in
 * older files, or rope_parameters), from GGUF metadata, from tensor shapes or from a preset. All
 * other code trusts it. */
#pragma once

#include "base/json.h"
#include "formats/store.h"
#include "formats/writer.h"

#define NBI_CONFIG_FILE_MAX ((size_t)16 << 20) /* bytes of a config file */
#define NBI_MAX_EOS         8

struct nbi_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers, heads, kv_heads, head_dim;
    int64_t max_position;
    double rms_eps, rope_theta;
    double initializer_range;
    bool tied;             /* the head is the embedding */
    double yarn_factor;    /* YaRN: by how much the context is extended; 0: no YaRN */
    int64_t yarn_original; /* YaRN: the context of the original training */
    int64_t bos, pad;      /* token ids; -1: none */
    int64_t eos[NBI_MAX_EOS];
    int eos_count;
};

/* Missing fields get Hugging Face's defaults where it has any. What nibble does not implement
 * (another architecture, biases, sliding windows, other scalings) is NB_EUNSUPPORTED. */
enum nb_status nbi_config_parse(struct nbi_config *c, const json_t *json);
enum nb_status nbi_config_from_gguf(struct nbi_config *c, const struct nbi_store *store);

/* ---- GGUF ---- */

#define NBI_GGUF_ARCHITECTURE_KEY "general.architecture"
#define NBI_GGUF_ARCHITECTURE     "qwen3"
#define NBI_GGUF_VOCAB_SIZE       "qwen3.vocab_size" /* for files without a tokenizer */

/* *known: whether the file has the architecture whose parameter names are known (params.h). */
enum nb_status nbi_config_knows_gguf(const struct nbi_store *store, bool *known);

/* Adds the metadata of a config, except for architecture and token ids. */
void nbi_config_to_gguf(const struct nbi_config *c, struct nbi_gguf_meta *meta);

/* ---- other sources ---- */

/* A config from tensor shapes: all sizes. eps, theta and the context length get defaults. */
enum nb_status nbi_config_infer(struct nbi_config *c, const struct nbi_store *store);

/* The config of a random model: of one of NB_PRESET_LIST, or read from a config.json. One of the
 * two is NULL. */
enum nb_status nbi_config_synthetic(struct nbi_config *c, const char *size, const char *path);

/* name: one of NB_PRESET_LIST; NB_EINVAL otherwise. */
enum nb_status nbi_config_preset(struct nbi_config *c, const char *name);

/* The config as a config.json; the caller owns *out. */
enum nb_status nbi_config_to_json(const struct nbi_config *c, json_t **out);
