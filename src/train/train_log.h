/* train_log.h - the log of a training run: one line of JSON for each step and each evaluation.
 *
 *   {"step":120,"loss":2.31,"lr":1e-05,"grad_norm":0.9,"tokens":491520,"tokens_per_s":812.5,
 *    "seconds":604.9,"resident_bytes":8589934592}
 *   {"step":120,"eval":{"tokens":20000,"loss":2.4,"ppl":11.02}}
 *
 * Each line is written immediately; non-finite numbers are null. A resumed run cuts off the lines
 * after the step of its checkpoint and appends, so the log looks like that of an uninterrupted run.
 * Therefore a step and its evaluation must be logged before their checkpoint is saved. */
#pragma once

#include "base/status.h"

struct nbi_log_extra {
    const char *name;
    double value;
};

struct nbi_log_step {
    int64_t step;
    double loss, lr, grad_norm;
    int64_t tokens; /* since the start of the run */
    double tokens_per_s;
    double seconds; /* since the start of the run */
    uint64_t resident_bytes;
    uint64_t device_bytes; /* of a GPU; 0: none, and not in the line */
};

struct nbi_log_eval {
    int64_t step;
    double loss, ppl;
    int64_t tokens;
};

/* ---- writing ---- */

struct nbi_train_log;

/* resumed: the step a run resumes from; negative: a new run, which empties an old log. Cuts the
 * file before the first line of a later step, and drops an incomplete last line. Refuses, and does
 * not change, a file that has any other line or that another run is writing. */
enum nb_status nbi_train_log_open(struct nbi_train_log **out, const char *path, int64_t resumed);
void nbi_train_log_close(struct nbi_train_log *log); /* NULL is fine */

/* extra: further numbers, added at the end of the line. */
enum nb_status nbi_train_log_step(struct nbi_train_log *log, const struct nbi_log_step *s,
                                  const struct nbi_log_extra *extra, size_t extra_count);
enum nb_status nbi_train_log_eval(struct nbi_train_log *log, const struct nbi_log_eval *e);

/* ---- reading ---- */

struct nbi_history {
    struct nbi_log_step *steps;
    size_t step_count, step_capacity;
    struct nbi_log_eval *evals;
    size_t eval_count, eval_capacity;
};

/* Reads all steps and evaluations. A missing or null number becomes NaN, a missing count 0. An
 * incomplete last line is ignored; any other line that is not of a log is NB_EFORMAT. */
enum nb_status nbi_history_read(struct nbi_history *h, const char *path);
void nbi_history_release(struct nbi_history *h);
enum nb_status nbi_history_add_step(struct nbi_history *h, const struct nbi_log_step *line);
enum nb_status nbi_history_add_eval(struct nbi_history *h, const struct nbi_log_eval *line);
