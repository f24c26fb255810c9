/* export.h - a model on its way to disk: which tensors, in which types, and the files beside them
 * (config, tokenizer, quantisation settings, GGUF metadata). */
#pragma once

#include "base/file.h"
#include "convert/model.h"
#include "formats/writer.h"

/* One tensor of the output and what it is made from. */
struct nbi_item {
    struct nbi_out out;
    const struct nbi_entry *src; /* NULL: made from nothing (synth) */
    enum nbi_dtype narrow;       /* f32 out: the type that would hold its values as well */
    float tensor_scale;          /* NVFP4 with out.two_level */
    float divisor;               /* its reciprocal as stored in the source, or 0 */
    float amax;                  /* of src; negative: not known yet */
};

struct nbi_target {
    enum nbi_format format;
    bool directory;
};

/* What a path names, by its ending. */
enum nb_status nbi_target_of(const char *path, struct nbi_target *target);

struct nbi_export {
    struct nbi_target target;
    struct nbi_stage stage;
    struct nbi_writer *writer;
};

/* Lays out everything and writes the files beside the weights. */
enum nb_status nbi_export_begin(struct nbi_export *x, const struct nb_convert_opts *opts,
                                const struct nbi_model *model, const struct nbi_item *items,
                                int64_t count);
enum nb_status nbi_export_commit(struct nbi_export *x);
void nbi_export_abort(struct nbi_export *x);

/* The metadata that notes which f32 tensors of a GGUF hold narrower values (norms must be f32
 * there): arrays of tensor names. */
#define NBI_KEY_FROM_BF16 "nibble.from_bf16"
#define NBI_KEY_FROM_F16  "nibble.from_f16"
