/* train_log.h - the log of a training run: a JSON object per line, one for each step and
 * evaluation.
 *
 *   {"step":120,"loss":2.31,"lr":1e-05,"grad_norm":0.9,"tokens":491520,"tokens_per_s":812.5,
 *    "seconds":604.9,"resident_bytes":8589934592}
 *   {"step":120,"eval":{"tokens":20000,"loss":2.4,"ppl":11.02}}
 *
 * Each line is written at once. What is not finite is null. A run that goes on from a checkpoint
 * continues the file behind the lines of that step, so the log is that of one straight run. Log a
 * step, and the evaluation that belongs to it, before its checkpoint is saved. */
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
};

struct nbi_log_eval {
    int64_t step;
    double loss, ppl;
    int64_t tokens;
};

/* ---- writing ---- */

struct nbi_train_log;

/* resumed < 0: a new run, an old log is emptied. Otherwise the file goes on: lines from the first
 * of a step past `resumed` on are cut off, and so is a last line without its end. A file that has
 * one line of anything else, or that another run is writing, is refused and left alone. */
enum nb_status nbi_train_log_open(struct nbi_train_log **out, const char *path, int64_t resumed);
void nbi_train_log_close(struct nbi_train_log *log); /* NULL is fine */

/* extra: further numbers of the caller's, behind the others. */
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

/* All steps and evaluations; numbers that are null or not there are NaN or 0. A last line without
 * its end is passed over, anything else that is not a line of a log is NB_EFORMAT. */
enum nb_status nbi_history_read(struct nbi_history *h, const char *path);
void nbi_history_release(struct nbi_history *h);
enum nb_status nbi_history_add_step(struct nbi_history *h, const struct nbi_log_step *line);
enum nb_status nbi_history_add_eval(struct nbi_history *h, const struct nbi_log_eval *line);
