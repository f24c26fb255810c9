/* cmd_eval_ab.h - 'nibble eval ab': two models side by side. */
#pragma once

#include "cli/model_options.h"

struct cli_ab_opts {
    const char *a, *b, *prompts, *out, *system;
    int64_t max_tokens, seed;
    double temp;
    bool raw, no_think, one_at_a_time, answers;
};

int cli_eval_ab(const struct cli_ab_opts *o, const struct cli_run_opts *run,
                const struct cli_common *common);
