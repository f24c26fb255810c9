/* plan_fit.h - 'nibble plan --fit': which settings a training run would fit with. */
#pragma once

#include "cli/cli.h"

/* Adds "fits" and "smallest" to plan, which it frees, or prints lines where plan is NULL. */
int cli_plan_fit(const struct nb_train_opts *opts, double gib, json_t *plan);
