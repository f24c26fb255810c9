/* cmd_eval_identity.h - 'nibble eval identity'. */
#pragma once

#include "cli/model_options.h"

struct cli_identity_opts {
    const char *base, *target, *name, *replay, *languages, *text;
    int64_t count, questions, max_tokens, seed;
    bool one_at_a_time;
};

int cli_eval_identity(const struct cli_identity_opts *o, const struct cli_run_opts *run,
                      const struct cli_common *common);

/* Prints some answers before and after. */
void cli_print_identity_examples(const struct nb_identity_result *r);

/* Prints the result: a table, the gates, and with `verbose` every answer. */
void cli_print_identity(const struct nb_identity_result *r, bool verbose);
json_t *cli_identity_json(const struct nb_identity_result *r, bool *ok);
