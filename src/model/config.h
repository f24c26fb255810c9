/* config.h - the sizes of a dense Qwen3, validated once; everything else trusts them.
 *
 * From Hugging Face's config.json (both the older form with rope_theta and the newer one with
 * rope_parameters), from GGUF metadata, or from a preset. */
#pragma once

#include "base/json.h"
#include "formats/store.h"
#include "formats/writer.h"

#define NBI_MAX_EOS 8

struct nbi_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers, heads, kv_heads, head_dim;
    int64_t max_position;
    double rms_eps, rope_theta;
    double initializer_range;
    bool tied;             /* the head is the embedding */
    double yarn_factor;    /* 0: no scaling; else rope is extended by YaRN */
    int64_t yarn_original; /* positions it was trained for */
    int64_t bos, pad;      /* token ids, -1: none */
    int64_t eos[NBI_MAX_EOS];
    int eos_count;
};

/* Fields that are missing take Hugging Face's defaults where it has any; what nibble does not
 * implement (another architecture, biases, sliding windows, other scalings) is refused by name. */
enum nb_status nbi_config_parse(struct nbi_config *c, const json_t *json);
enum nb_status nbi_config_from_gguf(struct nbi_config *c, const struct nbi_store *store);

#define NBI_GGUF_ARCHITECTURE "qwen3"
#define NBI_GGUF_VOCAB_SIZE   "qwen3.vocab_size" /* for files without a tokenizer */

/* Whether the file is of an architecture whose parameters and metadata are known here. */
enum nb_status nbi_config_knows_gguf(const struct nbi_store *store, bool *known);
void nbi_config_to_gguf(const struct nbi_config *c, struct nbi_gguf_meta *meta);

/* What shapes alone tell: all sizes, but not eps, theta or positions, which get defaults. */
enum nb_status nbi_config_infer(struct nbi_config *c, const struct nbi_store *store);

/* "tiny", "0.6b", "1.7b", "4b", "8b". */
enum nb_status nbi_config_preset(struct nbi_config *c, const char *name);

/* A new config.json value; the caller owns it. */
enum nb_status nbi_config_to_json(const struct nbi_config *c, json_t **out);
