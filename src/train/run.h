/* run.h - a training run: everything it needs, opened once, and where it stands. */
#pragma once

#include "data/mix.h"
#include "model/model.h"
#include "train/batches.h"
#include "train/kl_anchor.h"
#include "train/lr_schedule.h"
#include "train/optimizer.h"
#include "train/train_log.h"

#define NBI_EVAL_TEXTS   64
#define NBI_BATCH_TOKENS (1 << 24) /* of a pass at most */

/* Where a run stands: with the masters and moments all that a checkpoint needs. */
struct nbi_run_state {
    int64_t step;    /* steps done */
    int64_t updates; /* of them, not skipped; counts for Adam's corrections */
    int64_t skipped;
    int64_t tokens; /* trained on */
    double seconds;
    double best_loss;  /* of evaluations; infinite before the first */
    int64_t evaluated; /* step of the last evaluation */
    int64_t accepted;  /* of the last that was within stop_if_ppl_rises; -1: none */
    bool stopped;      /* by stop_if_ppl_rises */
    struct nbi_loader_state loader, replay_loader;
};

/* Held-out data. Text is measured as `nibble eval ppl` does: the tokens of a file in windows of
 * seq_len, of which all but the first are predicted. Conversations as they are trained on. */
struct nbi_eval_set {
    struct nbi_dataset *data; /* NULL: only text */
    struct {
        int32_t *ids;
        int64_t count;
    } texts[NBI_EVAL_TEXTS];
    int text_count;
};

/* The prompts of a file and what the model says to them, greedily; NULL: nothing yet. */
struct nbi_test_prompts {
    struct nb_prompts *list;
    char **before, **after;
    int64_t count;
};

/* Memory at the points of the first step. */
#define NBI_PHASES 6

struct nbi_phase {
    const char *name;
    int64_t when; /* seconds since 1970 */
    uint64_t bytes;
};

/* Checksums of what a run depends on beside its data and its checkpoints. */
struct nbi_fingerprint {
    uint32_t model;  /* config and types; with kl_base all values */
    uint32_t frozen; /* parameters that are not trained */
    uint32_t eval;   /* held-out data, where it may end the run */
};

struct nbi_run {
    const struct nb_train_opts *opts;
    struct nbi_model model;
    struct nbi_config config;
    struct nb_tokenizer *tokenizer; /* NULL: random tokens */
    struct nb_chat *chat;
    struct nbi_dataset *data, *replay_data;
    struct nbi_eval_set eval;
    struct nbi_loader loader, replay_loader; /* replay: only with replay_data */
    struct nbi_kl_anchor kl_anchor;          /* only with kl_base */
    struct nbi_microbatch *microbatches;     /* [grad_accum] */
    struct nbi_backend *be;
    struct nbi_stream *stream;
    struct nbi_train_params params;
    struct nbi_acts acts;
    struct nbi_train_pass train_pass;
    struct nbi_optimizer optimizer;
    struct nbi_lr_schedule_opts lr_schedule;
    struct nbi_train_log *log;
    struct nbi_ckpt_lock *lock; /* of the checkpoints; NULL: there are none */
    struct nbi_test_prompts test_prompts;
    struct nbi_history history; /* of this process */
    struct nbi_phase phases[NBI_PHASES];
    int phase_count;
    int64_t eval_logged; /* step of the last evaluation in the log that this run continues */
    struct nbi_run_state state;
    struct nbi_fingerprint fingerprint; /* only with checkpoints */
    int64_t steps;                      /* of the whole run, epochs included */
    int64_t first_step;                 /* the step that this process began with */
    int64_t saved_step; /* the step of the last checkpoint that was read or written */
    bool updating;      /* weights are between two steps: nothing to save */
    bool save_failed;   /* a checkpoint could not be written, and it was said */
    bool log_failed;    /* the log ended early */
    bool exported;      /* the result is in place */
};

/* Says what went wrong without ending the run: the last error, and this. */
void nbi_run_warn(const struct nbi_run *r, const char *then);

/* Opens all, with a fresh state. nbi_run_close also after a failure. */
enum nb_status nbi_run_open(struct nbi_run *r, const struct nb_train_opts *opts);
void nbi_run_close(struct nbi_run *r);

/* Opens only what a plan takes: no data, nothing of the model's values. */
enum nb_status nbi_run_open_plan(struct nbi_run *r, const struct nb_train_opts *opts);
enum nb_status nbi_run_plan(const struct nbi_run *r, struct nb_train_plan *plan);

/* Whether this machine has so much memory to give. */
enum nb_status nbi_run_check_memory(const struct nb_train_plan *plan);

/* The format of the result; of safetensors if nothing is written. */
enum nbi_format nbi_run_format(const struct nb_train_opts *opts);

struct nbi_train_params_opts nbi_run_params_opts(const struct nb_train_opts *opts);
struct nbi_acts_opts nbi_run_acts_opts(const struct nb_train_opts *opts,
                                       const struct nbi_config *c);

/* ---- batches (batches.c) ---- */

bool nbi_run_random_tokens(const struct nb_train_opts *opts);
enum nb_status nbi_run_open_batches(struct nbi_run *r);
void nbi_run_close_batches(struct nbi_run *r);

/* The next micro-batches; *more false: the data has ended, and there are none. */
enum nb_status nbi_run_next(struct nbi_run *r, bool *more);

/* With kl_base: the probabilities of the model as it was read. Before a checkpoint is loaded. */
enum nb_status nbi_run_kl_anchor(struct nbi_run *r);

/* ---- evaluation (evaluate.c) ---- */

enum nb_status nbi_eval_open(struct nbi_run *r);
void nbi_eval_close(struct nbi_eval_set *set);
bool nbi_eval_any(const struct nbi_eval_set *set);

/* The sum of losses over the held-out data with the given weights, and how many tokens were
 * predicted. Uses the first micro-batch. */
enum nb_status nbi_run_evaluate(struct nbi_run *r, const struct nbi_weights *w, double *loss,
                                int64_t *count);

/* ---- checkpoints (resume.c, identity.c) ---- */

/* Sets r->sums, from the model as it was read: before a checkpoint is loaded. */
enum nb_status nbi_run_fingerprint(struct nbi_run *r);

enum nb_status nbi_run_save(struct nbi_run *r);

/* Goes on from the newest whole checkpoint, or begins where there is none. Settings that would
 * change what is computed must be the same. */
enum nb_status nbi_run_resume(struct nbi_run *r);

/* Keeps the model of this step, and goes back to the one that was kept last: its parameters, not
 * its place in the run. */
enum nb_status nbi_run_save_accepted(struct nbi_run *r);
enum nb_status nbi_run_load_accepted(struct nbi_run *r);

/* ---- prompts (prompts.c) ---- */

struct nb_train_answer nbi_test_prompts_at(const struct nbi_test_prompts *p, int64_t i);

enum nb_status nbi_test_prompts_open(struct nbi_test_prompts *p, const char *path);
void nbi_test_prompts_close(struct nbi_test_prompts *p);

/* Fills one of before and after. */
enum nb_status nbi_test_prompts_run(struct nbi_test_prompts *p, struct nbi_run *r, char **answers);

/* ---- results (export.c) ---- */

/* What would be refused after the last step, before anything is allocated: lays the target out. */
enum nb_status nbi_run_check_export(const struct nbi_run *r,
                                    const struct nbi_train_params_opts *opts);

/* Appears when it has been read again, and compared. */
enum nb_status nbi_run_export(struct nbi_run *r);

/* ---- for people (summary.c) ---- */

/* Remembers a line for the report, and logs it. */
enum nb_status nbi_run_note_step(struct nbi_run *r, const struct nbi_log_step *line, double kl);
enum nb_status nbi_run_note_eval(struct nbi_run *r, const struct nbi_log_eval *line);

/* Whether the files of reports and the log can be made, and replace nothing that is used. */
enum nb_status nbi_run_check_reports(const struct nbi_run *r);

/* report.html in the result's directory, or beside its file. */
enum nb_status nbi_run_report(struct nbi_run *r);

/* Memory by phases of the first step, in the predecessor's format. A phase is noted once. */
void nbi_run_phase(struct nbi_run *r, const char *phase);
enum nb_status nbi_run_memory_report(struct nbi_run *r, const char *path);
