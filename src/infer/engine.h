/* engine.h - a loaded model: weights on a backend, tokenizer and chat template.
 *
 * An engine does not change once it is open, so any number of sessions and threads may use it. */
#pragma once

#include "base/sys.h"
#include "model/execute.h"
#include "model/model.h"
#include "nibble/text.h"

struct nb_engine {
    struct nbi_backend *be;
    struct nbi_config config;
    struct nbi_weights weights;
    struct nbi_model files;         /* zeroed for random weights */
    struct nb_tokenizer *tokenizer; /* NULL: the model has none */
    struct nb_chat *chat;           /* NULL as well then */
    struct nb_sampling defaults;    /* from generation_config.json */
    int32_t eos[2 * NBI_MAX_EOS];   /* ids that end an answer, from both config files */
    int eos_count;
    enum nbi_simd level;
    int threads;
};

/* Whether an id ends an answer. */
bool nbi_engine_is_eos(const struct nb_engine *e, int32_t id);

/* Fails if an id is not in the vocabulary. */
enum nb_status nbi_engine_check_ids(const struct nb_engine *e, const int32_t *ids, int64_t count);

/* Tokenizes a prompt of one user message, rendered by the chat template with thinking off. The
 * caller frees *ids. */
enum nb_status nbi_engine_encode_question(const struct nb_engine *e, const char *question,
                                          int32_t **ids, size_t *count);

/* An engine over a model in training. Nothing is copied, and nothing is to be released; everything
 * must outlive the engine. */
struct nbi_engine_parts {
    struct nbi_backend *be;
    const struct nbi_config *config;
    const struct nbi_weights *weights;
    const char *dir; /* of generation_config.json; NULL: none */
    struct nb_tokenizer *tokenizer;
    struct nb_chat *chat;
    int threads;
};

enum nb_status nbi_engine_borrow(struct nb_engine *e, const struct nbi_engine_parts *parts);
