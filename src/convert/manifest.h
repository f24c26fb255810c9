/* manifest.h - the tensors of an output: which, in which types, in which order. */
#pragma once

#include "formats/writer.h"
#include "model/model.h"
#include "nibble/files.h"

/* A tensor of the output and its source. */
struct nbi_manifest_entry {
    struct nbi_tensor_spec out;
    const struct nbi_entry *src;  /* NULL: generated (synth) */
    enum nbi_dtype original_type; /* before any conversion to f32; the values still fit it */
    float tensor_scale;           /* NVFP4 with out.two_level */
    float divisor;                /* exact reciprocal of tensor_scale from the source, or 0 */
    float amax;                   /* of src; negative: not computed yet */
    int64_t order;                /* position in the file */
};

struct nbi_manifest {
    struct nbi_manifest_entry *entries;
    int64_t count;
    const struct nbi_store *store;
    int64_t *where; /* index in the store -> index in entries */
};

/* quant is NULL for a plain conversion. Release the manifest even after a failure. */
enum nb_status nbi_manifest_init(struct nbi_manifest *list, const struct nbi_model *m,
                                 enum nbi_format target, const struct nb_convert_opts *opts,
                                 const struct nb_quantize_opts *quant);
void nbi_manifest_release(struct nbi_manifest *list);

/* The type that floats of type `dtype` get in a target. In GGUF vectors are f32: llama.cpp supports
 * norm weights in f32 only. */
enum nbi_dtype nbi_float_dtype_for(enum nbi_format target, int ndim, enum nbi_dtype dtype);

/* Whether the conversion quantises this tensor, rather than copying NVFP4. */
bool nbi_manifest_quantized_here(const struct nbi_manifest_entry *item);

/* Lists the entries that a runtime fuses with this one (q, k, v; gate, up), itself included, and
 * returns their number. They share one tensor scale. */
int nbi_manifest_fused(struct nbi_manifest *list, struct nbi_manifest_entry *item,
                       struct nbi_manifest_entry *group[3]);

/* Warns about fused entries with different types or scales. */
void nbi_manifest_warn_unequal(struct nbi_manifest *list);

/* GGUF metadata: arrays of the names of f32 tensors (vectors must be f32 there) whose values are
 * bf16 or f16. */
#define NBI_KEY_FROM_BF16 "nibble.from_bf16"
#define NBI_KEY_FROM_F16  "nibble.from_f16"
