/* model_writer.h - writes a model: the weights, and the files next to them (config, tokenizer,
 * quantisation settings) or the GGUF metadata. */
#pragma once

#include "convert/manifest.h"
#include "convert/staging_dir.h"

struct nbi_output {
    enum nbi_format format;
    bool directory;
};

/* Determines from its ending what a path names. */
enum nb_status nbi_output_of(const char *path, struct nbi_output *target);

struct nbi_model_writer {
    struct nbi_output target;
    struct nbi_staging_dir staging;
    struct nbi_writer *writer;
};

/* Lays out the weights and writes everything else. */
enum nb_status nbi_model_writer_begin(struct nbi_model_writer *w,
                                      const struct nb_convert_opts *opts,
                                      const struct nbi_model *model,
                                      const struct nbi_manifest_entry *items, int64_t count);

/* Opens what has been written, once all values are, to check it before the commit. After a failure
 * call nbi_model_writer_abort. */
enum nb_status nbi_model_writer_reopen(struct nbi_model_writer *w, struct nbi_store **out);

enum nb_status nbi_model_writer_commit(struct nbi_model_writer *w);
void nbi_model_writer_abort(struct nbi_model_writer *w);
