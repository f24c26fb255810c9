/* run.h - a training run: everything it needs, opened once, and its progress.
 *
 * A step, in the order of the files: trainer.c -> batches.c (data/mix.c, data/loader.c) ->
 * model/forward.c -> loss and model/backward.c -> optimizer.c -> train_log.c. Between steps:
 * evaluate.c, resume.c. At the end: export.c, summary.c. */
#pragma once

#include "data/mix.h"
#include "model/model.h"
#include "nibble/tools.h"
#include "train/batches.h"
#include "train/kl_anchor.h"
#include "train/lr_schedule.h"
#include "train/optimizer.h"
#include "train/test_prompts.h"
#include "train/train_log.h"

#define NBI_EVAL_TEXTS   64        /* files of held-out text */
#define NBI_BATCH_TOKENS (1 << 24) /* limit of batch_size * seq_len */
#define NBI_SKIPPED_MAX  10        /* skipped steps in a row that end a run */

/* The progress of a run. A checkpoint holds this, the masters and the moments. */
struct nbi_run_state {
    int64_t step;           /* steps done */
    int64_t updates;        /* of those, that changed parameters: Adam's step number */
    int64_t skipped;        /* of those, with a gradient that was not finite */
    int64_t skipped_in_row; /* of the last steps */
    int64_t tokens;         /* trained on */
    double seconds;
    double best_loss;  /* of evaluations; infinite before the first */
    int64_t evaluated; /* step of the last evaluation */
    int64_t accepted;  /* step of the last one within stop_if_ppl_rises; -1: none */
    bool stopped;      /* by stop_if_ppl_rises */
    struct nbi_loader_state loader, replay_loader;
};

/* Held-out data. Text is measured as `nibble eval ppl` does, in windows of seq_len tokens;
 * conversations are packed and masked as in training. */
struct nbi_eval_set {
    struct nbi_dataset *data; /* conversations; NULL: none */
    struct {
        int32_t *ids;
        int64_t count;
    } texts[NBI_EVAL_TEXTS];
    int text_count;
};

/* Memory at one point of the first step, for the memory report. */
#define NBI_PHASES 6

struct nbi_phase {
    const char *name;
    int64_t when; /* seconds since 1970 */
    uint64_t resident;
    uint64_t taken;           /* of a GPU by this process */
    struct nbi_memory device; /* of a GPU; total 0: none */
};

/* Checksums of everything a resumed run depends on that its checkpoint does not hold. */
struct nbi_fingerprint {
    uint32_t model;  /* config and types; with kl_base all values, too */
    uint32_t frozen; /* parameters that are not trained */
    uint32_t eval;   /* held-out data, if it may end the run */
};

struct nbi_run {
    const struct nb_train_opts *opts; /* borrowed */
    struct nbi_model model;           /* the source's files */
    struct nbi_config config;
    struct nb_tokenizer *tokenizer; /* NULL: random tokens */
    struct nb_chat *chat;
    struct nbi_dataset *data, *replay_data;
    struct nbi_eval_set eval;
    struct nbi_loader loader, replay_loader; /* the second only with replay_data */
    struct nbi_kl_anchor kl_anchor;          /* only with kl_base */
    struct nbi_microbatch *microbatches;     /* [grad_accum] of the next step */
    struct nbi_backend *be;
    struct nbi_stream *stream;
    struct nbi_train_params params;
    struct nbi_acts acts;
    struct nbi_train_pass train_pass;
    struct nbi_labels *labels; /* [grad_accum] of the step's passes, with their losses */
    float *losses;             /* [grad_accum, 2, N] theirs */
    struct nbi_optimizer optimizer;
    struct nbi_lr_schedule_opts lr_schedule;
    struct nbi_train_log *log;
    struct nbi_ckpt_lock *lock;          /* of checkpoint_dir; NULL: no checkpoints */
    struct nbi_checkpoint *resumed_from; /* until its arrays have been read; NULL: none */
    char other_bits[NBI_TUNING_WHY]; /* why the run does not go on bit for bit; empty: it does */
    struct nbi_test_prompts test_prompts;
    struct nbi_history history; /* of this process */
    struct nbi_phase phases[NBI_PHASES];
    int phase_count;
    struct nb_gpu_watch *gpu_watch; /* only for a memory report; NULL: the driver does not say */
    uint64_t device_bytes;          /* nb_train_progress */
    int64_t eval_logged; /* step of the last evaluation in the log that is continued; -1: none */
    struct nbi_run_state state;
    struct nbi_fingerprint fingerprint; /* only with checkpoints */
    int64_t steps;                      /* of the whole run, with epochs converted to steps */
    int64_t epoch_steps;                /* if they are few; 0: not known */
    int64_t first_step;                 /* steps done when this process began */
    int64_t saved_step;                 /* of the last checkpoint that was read or written */
    bool updating;    /* some parameters are updated, others not: nothing to save */
    double saved_at;  /* when the last checkpoint was written, or the first step began */
    double save_took; /* seconds */
    bool save_failed; /* a checkpoint could not be written, and a warning said so */
    bool log_failed;  /* the log could not be written, and ends early */
    bool exported;    /* the result is in place */
};

/* Passes the last error to the caller's warn, followed by what the run does about it. */
void nbi_run_warn(const struct nbi_run *r, const char *then);

/* Tells the caller that a stage begins, and how far it is. */
void nbi_run_stage(const struct nbi_run *r, const char *what);
void nbi_run_stage_progress(const struct nbi_run *r, int64_t done, int64_t total);

/* ---- opening (setup.c) ---- */

/* Opens everything, with a fresh state. Call nbi_run_close also after a failure. */
enum nb_status nbi_run_open(struct nbi_run *r, const struct nb_train_opts *opts);
void nbi_run_close(struct nbi_run *r);

/* Whether sizes and settings of a step make sense together. */
enum nb_status nbi_run_check_sizes(const struct nb_train_opts *opts);

/* Opens what nbi_run_plan needs: no data, and no values of the model. */
enum nb_status nbi_run_open_plan(struct nbi_run *r, const struct nb_train_opts *opts);

/* Opens the data of a run that nbi_run_open_plan has opened, and counts its steps. */
enum nb_status nbi_run_open_data(struct nbi_run *r);

/* Opens a run over random weights and tokens in these sizes, for its steps alone. opts->synthetic
 * is set. Call nbi_run_close also after a failure. */
enum nb_status nbi_run_open_random(struct nbi_run *r, const struct nb_train_opts *opts,
                                   const struct nbi_config *config);

/* With kl_base: computes the probabilities of the model as it was read. Call it before a
 * checkpoint is loaded. */
enum nb_status nbi_run_kl_anchor(struct nbi_run *r);

/* ---- advice (advice.c) ---- */

/* Warns of a run with few steps, or with few after its warm-up, before the first step. */
enum nb_status nbi_run_look_at_length(struct nbi_run *r);

/* Warns if the loss ends where it began. */
void nbi_run_look_at_loss(const struct nbi_run *r);

/* ---- the plan (plan.c) ---- */

/* The memory of the run, without allocating it. */
enum nb_status nbi_run_plan(const struct nbi_run *r, struct nb_train_plan *plan);

/* What --fit of so many GiB allows, and the --fit that would allow so many bytes: on the CPU all of
 * it; a card sold as N GB has less. */
int64_t nbi_run_fit_limit(const struct nbi_run *r, double gib);
double nbi_run_fit_size(const struct nbi_run *r, int64_t bytes);

/* NB_ENOMEM if this machine has less memory free than the plan asks for, or the GPU that has been
 * opened for the run. */
enum nb_status nbi_run_check_memory(const struct nb_train_plan *plan);
enum nb_status nbi_run_check_gpu_memory(const struct nbi_run *r);

/* The format of the result; safetensors if nothing is written. */
enum nbi_format nbi_run_format(const struct nb_train_opts *opts);

/* Whether activations are bf16: as the options say, or the backend. */
bool nbi_run_computes_in_bf16(const struct nbi_run *r);

/* The options of a run as those of its parameters, activations and stream. The last two need its
 * config and backend. */
struct nbi_train_params_opts nbi_run_params_opts(const struct nb_train_opts *opts);
struct nbi_acts_opts nbi_run_acts_opts(const struct nbi_run *r);
struct nbi_stream_limits nbi_run_stream_limits(const struct nbi_run *r);

/* Host memory for the losses of a micro-batch of N tokens. */
static inline int64_t nbi_run_losses_bytes(int64_t N)
{
    return 2 * N * (int64_t)sizeof(float) + (int64_t)sizeof(struct nbi_labels);
}

/* ---- batches (batches.c) ---- */

/* Whether the weights that the run begins with are random. */
bool nbi_run_random_weights(const struct nb_train_opts *opts);

/* Whether the run trains on random tokens in place of data. */
bool nbi_run_random_tokens(const struct nb_train_opts *opts);

/* Opens the data, its loaders and the micro-batches, and sets r->steps. */
enum nb_status nbi_run_open_batches(struct nbi_run *r);
void nbi_run_close_batches(struct nbi_run *r);

/* Fills the micro-batches of the next step. *more false: the data has ended. */
enum nb_status nbi_run_next_batches(struct nbi_run *r, bool *more);

/* One step with these micro-batches (trainer.c). */
enum nb_status nbi_run_step(struct nbi_run *r, struct nb_train_progress *p);

/* ---- evaluation (evaluate.c) ---- */

enum nb_status nbi_eval_open(struct nbi_run *r);
void nbi_eval_close(struct nbi_eval_set *set);
bool nbi_eval_any(const struct nbi_eval_set *set);

/* Sums the loss of these weights over the held-out data; *count: predicted tokens. Overwrites
 * the first micro-batch. */
enum nb_status nbi_run_evaluate(struct nbi_run *r, const struct nbi_weights *w, double *loss,
                                int64_t *count);

/* ---- checkpoints (resume.c, fingerprint.c) ---- */

/* Sets r->fingerprint from the model as it was read. Call it before a checkpoint is loaded. */
enum nb_status nbi_run_fingerprint(struct nbi_run *r);

enum nb_status nbi_run_save(struct nbi_run *r);

/* Opens the newest complete checkpoint, and gives the backend what it had measured then. Without
 * one the run begins at the start. */
enum nb_status nbi_run_open_checkpoint(struct nbi_run *r);

/* Continues from that checkpoint, if there is one. Settings that change the computation must be
 * its own; between a CPU and a GPU the types of activations and gradients may change. */
enum nb_status nbi_run_resume(struct nbi_run *r);

/* Saves the model of this step as the accepted one; loads the parameters of the accepted model
 * and leaves r->state alone. */
enum nb_status nbi_run_save_accepted(struct nbi_run *r);
enum nb_status nbi_run_load_accepted(struct nbi_run *r);

/* ---- the result (export.c) ---- */

/* Lays out the result without writing values, so that whatever would be refused after the last
 * step is refused before the first. Needs no parameters in memory. */
enum nb_status nbi_run_check_export(const struct nbi_run *r,
                                    const struct nbi_train_params_opts *opts);

/* Writes the result, reads it back and compares it with the weights in memory before it appears
 * under its name. */
enum nb_status nbi_run_export(struct nbi_run *r);

/* ---- reports (summary.c) ---- */

/* Adds a line to the history of this process and to the log. kl: NaN if there is no anchor. */
enum nb_status nbi_run_note_step(struct nbi_run *r, const struct nbi_log_step *line, double kl);
enum nb_status nbi_run_note_eval(struct nbi_run *r, const struct nbi_log_eval *line);

/* Whether reports and log can be written, and would overwrite nothing that the run uses. */
enum nb_status nbi_run_check_reports(const struct nbi_run *r);

/* Writes report.html into the result's directory, or OUT.report.html if the result is a file. */
enum nb_status nbi_run_report(struct nbi_run *r);

/* Notes the memory at a phase of the first step; later steps are ignored. phase: a literal. */
void nbi_run_phase(struct nbi_run *r, const char *phase);
enum nb_status nbi_run_memory_report(struct nbi_run *r, const char *path);
