/* lr_schedule.h - the learning rate over the steps of a run. */
#pragma once

#include "nibble/train.h"

struct nbi_lr_schedule_opts {
    enum nb_lr_schedule kind;
    double lr;         /* maximum, after the warm-up */
    double final_frac; /* of lr, at the end */
    int64_t warmup;    /* steps, rising linearly from lr / warmup */
    int64_t steps;     /* of the run; may be 0 for a constant rate */
};

/* The warm-up that a run gets if none is asked for: a twentieth of its steps, at most 100, and none
 * with a constant rate, which does not depend on how long the run is. */
int64_t nbi_default_warmup(enum nb_lr_schedule kind, int64_t steps);

/* The learning rate of a step, counted from 0; past the end it stays at its final value. wsd is
 * constant and falls linearly over the last fifth of the steps. If the warm-up leaves at most one
 * step, the rate does not fall. */
double nbi_learning_rate(const struct nbi_lr_schedule_opts *o, int64_t step);
