/* plan_fit.h - 'nibble plan --fit': which settings a training run would fit with. */
#pragma once

#include "cli/cli.h"

/* Both give the exit code. */
int cli_plan_fit(const struct nb_train_opts *opts, double gib);

/* Prints plan, which it frees, with "fits" and "smallest" added. NULL: memory was out for it. */
int cli_plan_fit_json(const struct nb_train_opts *opts, double gib, json_t *plan);
