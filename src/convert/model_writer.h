/* model_writer.h - a model on its way to disk: the weights' files and those beside them (config,
 * tokenizer, quantisation settings, GGUF metadata). */
#pragma once

#include "convert/manifest.h"
#include "convert/staging_dir.h"

struct nbi_output {
    enum nbi_format format;
    bool directory;
};

/* What a path names, by its ending. */
enum nb_status nbi_output_of(const char *path, struct nbi_output *target);

struct nbi_model_writer {
    struct nbi_output target;
    struct nbi_staging_dir stage;
    struct nbi_writer *writer;
};

/* Lays out everything and writes the files beside the weights. */
enum nb_status nbi_model_writer_begin(struct nbi_model_writer *x,
                                      const struct nb_convert_opts *opts,
                                      const struct nbi_model *model,
                                      const struct nbi_manifest_entry *items, int64_t count);

/* When all values are written: what is there, to be checked before it takes the target's place.
 * After a failure: nbi_model_writer_abort. */
enum nb_status nbi_model_writer_reopen(struct nbi_model_writer *x, struct nbi_store **out);

enum nb_status nbi_model_writer_commit(struct nbi_model_writer *x);
void nbi_model_writer_abort(struct nbi_model_writer *x);
