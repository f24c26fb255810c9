/* lr_schedule.h - the learning rate over the steps of a run. */
#pragma once

#include "nibble.h"

struct nbi_lr_schedule_opts {
    enum nb_lr_schedule kind;
    double lr;         /* the highest */
    double final_frac; /* of it, at the end */
    int64_t warmup;    /* steps, rising in a line from lr / warmup */
    int64_t steps;     /* of the run; 0 is only good for a constant rate */
};

/* Of step 0, 1, ...; past the end that of the end. wsd is constant, and falls in a line over the
 * last fifth of the steps. Where the warm-up leaves one step or none, nothing falls. */
double nbi_learning_rate(const struct nbi_lr_schedule_opts *o, int64_t step);
