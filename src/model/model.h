/* model.h - a model as the tools take it: weights, and the config and tokenizer that go with them.
 */
#pragma once

#include "formats/store.h"
#include "model/params.h"

struct nbi_model {
    struct nbi_store *store;
    char *dir;           /* where config.json and the tokenizer are; NULL: nowhere */
    json_t *config_json; /* as found; NULL without a directory or for GGUF */
    bool has_config;
    struct nbi_config config;
    char config_error[512]; /* why there is none, for those who need one */
};

/* path: a directory or a weights file; model_dir: where to look for config.json instead of beside
 * it, may be NULL. A missing or unsupported config is not an error yet, except in model_dir. */
enum nb_status nbi_model_open(struct nbi_model *m, const char *path, const char *model_dir);
void nbi_model_close(struct nbi_model *m);

/* The weights alone. */
enum nb_status nbi_model_open_store(struct nbi_store **out, const char *path);

/* Gives the tensors of a GGUF Hugging Face's names (model/params.h); nbi_model_open and
 * nbi_model_open_store have done it. Tensors of an architecture that is not known keep theirs. */
enum nb_status nbi_model_translate(struct nbi_store *store);

/* Without weights: the config in a directory, with no store. */
enum nb_status nbi_model_open_config(struct nbi_model *m, const char *dir);

/* Fails with the reason if there is no usable config. */
enum nb_status nbi_model_need_config(const struct nbi_model *m);
