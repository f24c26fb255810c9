/* model.h - a model on disk: its weights, and the config that belongs to them. */
#pragma once

#include "formats/store.h"
#include "model/params.h"

struct nbi_model {
    struct nbi_store *store;
    char *dir;           /* of config.json and the tokenizer; NULL: none */
    json_t *config_json; /* as it was read; NULL without a directory or for GGUF */
    bool has_config;
    struct nbi_config config;
    char config_error[512]; /* why there is no config */
};

/* path: a directory or a weights file. model_dir (may be NULL): the directory of config.json, if
 * that is not next to the weights. A missing or unsupported config is an error only if model_dir is
 * given; nbi_model_need_config() reports it otherwise. */
enum nb_status nbi_model_open(struct nbi_model *m, const char *path, const char *model_dir);
void nbi_model_close(struct nbi_model *m);

/* Opens only the weights. */
enum nb_status nbi_model_open_store(struct nbi_store **out, const char *path);

/* Renames the tensors of a GGUF to Hugging Face's names (model/params.h), unless its architecture
 * is unknown. nbi_model_open() and nbi_model_open_store() have done so. */
enum nb_status nbi_model_translate(struct nbi_store *store);

/* Opens only the config in a directory; m->store is NULL. */
enum nb_status nbi_model_open_config(struct nbi_model *m, const char *dir);

/* Fails with m->config_error if there is no usable config. */
enum nb_status nbi_model_need_config(const struct nbi_model *m);
