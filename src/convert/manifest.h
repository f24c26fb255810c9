/* manifest.h - what an output will hold: which tensors, in which types, in which order. */
#pragma once

#include "formats/writer.h"
#include "model/model.h"

/* One tensor of the output and what it is made from. */
struct nbi_manifest_entry {
    struct nbi_tensor_spec out;
    const struct nbi_entry *src;  /* NULL: made from nothing (synth) */
    enum nbi_dtype original_type; /* f32 out: the type that would hold its values as well */
    float tensor_scale;           /* NVFP4 with out.two_level */
    float divisor;                /* its reciprocal as stored in the source, or 0 */
    float amax;                   /* of src; negative: not known yet */
    int64_t order;                /* place in the file */
};

struct nbi_manifest {
    struct nbi_manifest_entry *p;
    int64_t count;
    const struct nbi_store *store;
    int64_t *where; /* index of an entry in the store -> index of its item */
};

/* quant NULL: a plain conversion. Release in any case. */
enum nb_status nbi_manifest_list(struct nbi_manifest *list, const struct nbi_model *m,
                                 enum nbi_format target, const struct nb_convert_opts *opts,
                                 const struct nb_quantize_opts *quant);
void nbi_manifest_release(struct nbi_manifest *list);

/* The type in which a target gets floats that would be `dtype`: llama.cpp multiplies by norms in
 * f32 only. */
enum nbi_dtype nbi_float_dtype_for(enum nbi_format target, int ndim, enum nbi_dtype dtype);

/* Quantised here, not before. */
bool nbi_manifest_quantized_here(const struct nbi_manifest_entry *item);

/* The items that a runtime fuses with this one (q, k, v; gate, up), itself included; such items
 * share one tensor scale. The return value says how many. */
int nbi_manifest_fused(struct nbi_manifest *list, struct nbi_manifest_entry *item,
                       struct nbi_manifest_entry *group[3]);

/* Warns where fused items ended up with different types or scales. */
void nbi_manifest_warn_unequal(struct nbi_manifest *list);

/* Arrays of tensor names in a GGUF's metadata: f32 tensors (norms must be f32 there) that hold
 * values of a narrower type. */
#define NBI_KEY_FROM_BF16 "nibble.from_bf16"
#define NBI_KEY_FROM_F16  "nibble.from_f16"
