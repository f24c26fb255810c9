/* files.h - model files: what is in them, conversion, quantisation, random models.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define NB_MAX_DIMS 8

/* One tensor as a reader of the model sees it: the parts of a quantised weight are one row. */
struct nb_tensor_info {
    const char *name;  /* Hugging Face name */
    const char *dtype; /* "bf16", "nvfp4", ... */
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    uint64_t bytes;      /* all parts, as stored */
    uint64_t offset;     /* of the first part, from the start of its file */
    const char *file;    /* which file of the model holds it, without its directory */
    float tensor_scale;  /* NVFP4: the second-level scale; 1 where the file has none */
    const char *scaling; /* NVFP4: the stored type of the block scales; NULL otherwise */
};

/* An open model file. It never changes, so any number of threads may use it at once. */
struct nb_file;

/* Opens a model directory or one `.dat`, `.safetensors` or `.gguf` file and checks its structure.
 * config.json is looked for in model_dir (may be NULL), else next to the file; a model without
 * one opens too. NB_EFORMAT: it is damaged, or no model. */
NB_MUST_CHECK enum nb_status nb_file_open(struct nb_file **out, const char *path,
                                          const char *model_dir);
void nb_file_close(struct nb_file *file);

struct nb_file_info {
    const char *format; /* "dat", "safetensors", "gguf" */
    const char *layout; /* of NVFP4 tensors, or "none" */
    uint64_t bytes;     /* on disk, all files */
    int64_t tensors, metadata;
};

void nb_file_info(const struct nb_file *file, struct nb_file_info *info);

/* The tensors in file order; index is below nb_file_info.tensors. */
void nb_file_tensor(const struct nb_file *file, int64_t index, struct nb_tensor_info *info);

/* Metadata rows as text, in file order; index is below nb_file_info.metadata. Long values are
 * shortened. */
void nb_file_meta(const struct nb_file *file, int64_t index, const char **key, const char **value);

/* Checks names and shapes against the config (without a config, as far as the shapes allow), then
 * every value: scales must be finite and positive, no value NaN or infinite. The message names the
 * first problem, whose status is NB_EFORMAT or NB_EVALUE. threads: 0 for what this process may use.
 * progress, in bytes, and cancel may be NULL. */
NB_MUST_CHECK enum nb_status nb_file_verify(struct nb_file *file, int threads,
                                            nb_progress_fn progress, void *progress_ctx,
                                            struct nb_cancel *cancel);

/* ---- conversion and quantisation ------------------------------------------------------------- */

enum nb_out_dtype { NB_OUT_KEEP, NB_OUT_F32, NB_OUT_F16, NB_OUT_BF16 };
enum nb_out_layout { NB_LAYOUT_KEEP, NB_LAYOUT_MODELOPT, NB_LAYOUT_COMPRESSED_TENSORS };
enum nb_quant_method { NB_QUANT_RTN, NB_QUANT_4OVER6, NB_QUANT_SWEEP };

struct nb_convert_opts {
    const char *src, *dst; /* dst: by its ending, else a directory */
    const char *model_dir; /* config and tokenizer of a bare weights file; may be NULL */
    enum nb_out_dtype dtype;
    enum nb_out_layout layout; /* NVFP4 in safetensors; keep: the source's, else ModelOpt */
    uint64_t shard_bytes;      /* directories: start a new file past this; 0: 5 GB */
    int threads;               /* 0: what this process may use */
    nb_progress_fn progress;   /* in bytes of the source; may be NULL */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* Streams tensor by tensor; memory does not grow with the model. dst is replaced only at the end,
 * in one step: after a failure it is as it was, unless the message says that it is in place, and
 * what came later failed. NB_EINVAL: dst is src, or would hide a part of it. */
NB_MUST_CHECK enum nb_status nb_convert(const struct nb_convert_opts *opts);

struct nb_quantize_opts {
    struct nb_convert_opts to; /* dtype applies to what is not quantised */
    enum nb_quant_method method;
    bool two_level;
    const char *const *skip; /* wildcard patterns over tensor names; NULL-terminated or NULL */
};

/* The error of one family of tensors, for example all q_proj, against its source. */
struct nb_quant_family {
    char name[32];
    int64_t tensors, values;
    double snr_db, rel_mse, zeros; /* snr_db: infinite without error; zeros: share that became 0 */
};

#define NB_QUANT_FAMILIES 16

struct nb_quantize_report {
    int families; /* rows in use */
    struct nb_quant_family family[NB_QUANT_FAMILIES];
    struct nb_quant_family total;
    uint64_t source_bytes, output_bytes;
    double seconds; /* wall time of the whole operation */
};

/* Converts, and quantises every projection that is not NVFP4 yet; otherwise as nb_convert. */
NB_MUST_CHECK enum nb_status nb_quantize(const struct nb_quantize_opts *opts,
                                         struct nb_quantize_report *report);

/* The shapes of Qwen3 models, and of one for tests. */
#define NB_PRESET_LIST(X)                                                                          \
    X(NB_PRESET_TINY, "tiny")                                                                      \
    X(NB_PRESET_0_6B, "0.6b")                                                                      \
    X(NB_PRESET_1_7B, "1.7b")                                                                      \
    X(NB_PRESET_4B, "4b")                                                                          \
    X(NB_PRESET_8B, "8b")                                                                          \
    X(NB_PRESET_14B, "14b")                                                                        \
    X(NB_PRESET_32B, "32b")

enum nb_preset { NB_PRESET_LIST(NB_ENUMERATOR) };

struct nb_synth_opts {
    const char *preset;      /* a name of the list; or else */
    const char *config;      /* the path of a config.json, whose tokenizer is copied too */
    const char *dst;         /* a directory that is new or empty */
    enum nb_out_dtype dtype; /* NB_OUT_KEEP: bf16 */
    uint64_t seed;
    float sigma;             /* of the normal distribution; 0: the config's initializer_range */
    int threads;             /* 0: what this process may use */
    nb_progress_fn progress; /* in bytes written */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* A model with random weights: for a seed the same bytes, whatever the number of threads. After a
 * failure dst is as it was. */
NB_MUST_CHECK enum nb_status nb_synth(const struct nb_synth_opts *opts);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
