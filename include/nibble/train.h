/* train.h - the options of training runs, and what they report.
 *
 * Types only: the functions, and the rules on failures, ownership and threads, are in core.h, which
 * includes this file. The options are many, and only those who train need to read them. */
#pragma once

#include "nibble/base.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct nb_cancel; /* core.h */

/* A row is an enumerator and its name in options, reports and JSON. The numbers stand in
 * checkpoints: rows are only ever added, at the end. */
#define NB_PRECISION_LIST(X)                                                                       \
    X(NB_PRECISION_BF16, "bf16")                                                                   \
    X(NB_PRECISION_F32, "f32")                                                                     \
    X(NB_PRECISION_NVFP4, "nvfp4")

#define NB_MOMENT_TYPE_LIST(X)                                                                     \
    X(NB_MOMENT_F32, "f32")                                                                        \
    X(NB_MOMENT_BF16, "bf16")                                                                      \
    X(NB_MOMENT_INT8, "int8")                                                                      \
    X(NB_MOMENT_NVFP4, "nvfp4")

#define NB_COMPUTE_LIST(X)                                                                         \
    X(NB_COMPUTE_AUTO, "auto")                                                                     \
    X(NB_COMPUTE_F32, "f32")                                                                       \
    X(NB_COMPUTE_BF16, "bf16")

/* What is kept of NVFP4 weights besides their masters: codes and a copy in bf16, codes, or block
 * scales only, from which products make the codes anew. Results are the same, bit for bit. */
#define NB_WEIGHT_STORE_LIST(X)                                                                    \
    X(NB_WEIGHT_STORE_AUTO, "auto")                                                                \
    X(NB_WEIGHT_STORE_BF16, "bf16")                                                                \
    X(NB_WEIGHT_STORE_CODES, "codes")                                                              \
    X(NB_WEIGHT_STORE_SCALES, "scales")

#define NB_LOSS_LIST(X)                                                                            \
    X(NB_LOSS_CE, "ce")                                                                            \
    X(NB_LOSS_SCALAR, "scalar")

#define NB_LR_SCHEDULE_LIST(X)                                                                     \
    X(NB_SCHEDULE_CONSTANT, "constant")                                                            \
    X(NB_SCHEDULE_LINEAR, "linear")                                                                \
    X(NB_SCHEDULE_COSINE, "cosine")                                                                \
    X(NB_SCHEDULE_WSD, "wsd")

enum nb_precision { NB_PRECISION_LIST(NB_ENUMERATOR) };     /* weights of the forward pass */
enum nb_moment_type { NB_MOMENT_TYPE_LIST(NB_ENUMERATOR) }; /* AdamW's moments in memory */
enum nb_compute { NB_COMPUTE_LIST(NB_ENUMERATOR) };         /* activations and products */
enum nb_weight_store { NB_WEIGHT_STORE_LIST(NB_ENUMERATOR) };
enum nb_loss { NB_LOSS_LIST(NB_ENUMERATOR) };
enum nb_lr_schedule { NB_LR_SCHEDULE_LIST(NB_ENUMERATOR) };

/* The state of a training run after a step. */
struct nb_train_progress {
    int64_t step, steps; /* steps done; steps of the run */
    double loss, lr, grad_norm;
    int64_t tokens; /* so far */
    double tokens_per_s, seconds_left;
    uint64_t resident_bytes;
    uint64_t device_bytes; /* of a GPU's memory, context and libraries included; 0: on the CPU */
    int64_t skipped;       /* steps whose gradients were not finite */
    double kl;             /* KL(base model || model), mean over the anchored tokens; NaN: none */
};

/* An evaluation on held-out data, with the weights as used and with the masters. */
struct nb_train_eval {
    int64_t step, tokens;
    double loss, master_loss;
};

struct nb_train_result;

/* A prompt of test_prompts, and what the model said to it. Strings live for the call. */
struct nb_train_answer {
    const char *prompt, *before, *after;
};

/* nb_train_defaults() comes before the members are filled in. */
struct nb_train_opts {
    const char *model, *model_dir; /* as for nb_engine_opts */
    const char *synthetic;         /* instead: random weights and tokens of one of NB_PRESET_LIST */
    const char *config;            /* instead: the same in the shapes of a config.json */
    const char *device;            /* as for nb_engine_opts */
    bool random_tokens;            /* instead of data; implied by synthetic and config */
    const char *const *data;       /* files, NULL-terminated */
    const char *const *eval_data;  /* NULL: none */
    const char *out;               /* a .dat or a directory; NULL: nothing is written */
    bool from_scratch;             /* the model's config and tokenizer, but random weights */
    bool overwrite;                /* out may be what the model was read from */
    enum nb_loss loss; /* scalar: mean absolute difference of the final norm's output and the
                          embedding of the next token; evaluations are cross entropy always */

    double kl_base;      /* times KL(model as it was read || model), added to the loss of the
                            labelled tokens of replay, or of data without one; conversations only */
    const char *replay;  /* a file whose rows are mixed into every batch; NULL: none */
    double replay_share; /* of the rows, between 0 and 1, exclusive */

    int64_t steps, epochs; /* the run ends at whichever comes first; 0: no limit */
    int64_t seq_len, batch_size, grad_accum;
    double lr, final_lr_frac;
    enum nb_lr_schedule schedule;
    int64_t warmup; /* steps; NB_TRAIN_WARMUP: by the length of the run */
    double beta1, beta2, eps, weight_decay, grad_clip; /* 0: no clipping */
    bool clip_by_layer; /* each layer by its own norm; always so with fused_step */

    bool bf16_master;    /* with stochastic rounding; else f32 */
    bool bf16_gradients; /* of matrices in layers; for grad_accum 1 and activations in bf16 */
    enum nb_precision precision;
    enum nb_compute compute;           /* auto: bf16 on a GPU, but f32 with NB_PRECISION_F32 */
    enum nb_weight_store weight_store; /* auto: codes */
    enum nb_moment_type moment_type;
    int64_t step_chunk_rows, train_last_layers;
    bool recompute, fused_step, sequential;
    bool head_slices; /* with fused_step: gradients of embedding and head some rows at a time, each
                         clipped by its own norm */
    uint64_t seed;

    int64_t eval_every; /* steps; 0: at the end only */
    /* Stops when held-out perplexity exceeds its lowest value, that of the original model included,
     * by this many percent; 0: never. The result is the last model within the limit, kept in
     * checkpoint_dir; without a checkpoint_dir it is the model at the time of stopping. */
    double stop_if_ppl_rises;
    int64_t save_every;  /* steps; 0: at the end and on interruption only */
    double save_minutes; /* since the last checkpoint, after which there is another; 0: any */
    const char *checkpoint_dir;
    int keep; /* checkpoints */
    bool resume;
    const char *log;          /* JSON lines */
    const char *test_prompts; /* as for nb_prompts_open, answered before and after */
    const char
        *memory_report; /* JSON: memory by phases of the first step; of a GPU also by parts */

    const char *simd; /* this and the next as for nb_engine_opts */
    int threads;
    /* Callbacks, or NULL. What they get is valid during the call. Of the run's functions they may
     * call nb_trainer_status(). */
    /* Something other than a step begins: reading, evaluating, writing the result. */
    void (*stage)(void *ctx, const char *what);
    void (*stage_progress)(void *ctx, uint64_t done, uint64_t total); /* of that stage */
    void (*started)(void *ctx, const struct nb_train_result *so_far); /* ready for the first step */
    void (*progress)(void *ctx, const struct nb_train_progress *p);
    void (*evaluated)(void *ctx, const struct nb_train_eval *e);
    void (*answered)(void *ctx, const struct nb_train_answer *a); /* at the end, one by one */
    void (*warn)(void *ctx, const char *text); /* a failure that does not end the run */
    void *ctx;
    struct nb_cancel *cancel;
};

/* AdamW's settings where nothing else is asked for; macros, so that a help text can show them. */
#define NB_TRAIN_LR        1e-5
#define NB_TRAIN_BETA1     0.9
#define NB_TRAIN_BETA2     0.95
#define NB_TRAIN_EPS       1e-8
#define NB_TRAIN_GRAD_CLIP 1

/* A twentieth of the steps, at most 100; none with a constant rate. A run that is resumed with more
 * steps keeps the warm-up that it began with. */
#define NB_TRAIN_WARMUP (-1)

#define NB_TRAIN_SAVE_MINUTES 5

/* The memory of a run by part, in bytes, and its work. */
struct nb_train_plan {
    int64_t masters, moments, gradients, weights; /* weights: of the forward pass */
    int64_t activations, scratch;
    /* Only on a GPU: the session that answers test prompts, tables of the optimizer, what the
     * driver adds to blocks, and context, kernels and libraries. */
    int64_t prompts, tables, rounding, context;
    int64_t host;  /* batches and tables; on a GPU in the host's memory */
    int64_t total; /* of the device's memory: of a GPU without host */
    int64_t parameters;
    double flops_per_token;       /* forward and backward, recomputation not counted */
    double layer_flops_per_token; /* of these, the layers' in the forward pass: to recompute them */
    double head_flops_per_token;  /* and the head's */
    enum nb_compute compute;      /* f32 or bf16 */
    bool gpu;
};

struct nb_train_result {
    struct nb_train_progress last;
    struct nb_train_eval eval; /* the last one; tokens 0: none */
    struct nb_train_plan plan;
    uint64_t peak_bytes;         /* resident, of the process */
    bool interrupted;            /* a checkpoint was written, if there is a directory for it */
    bool exported;               /* the result is in place */
    bool stopped;                /* by stop_if_ppl_rises */
    int64_t result_step;         /* the step after which the exported weights were taken */
    char device[NB_DEVICE_NAME]; /* that trains; empty before its memory is taken */
};

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
