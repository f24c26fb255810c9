/* fit.h - settings of a training run that fit into --fit GiB: as text, as JSON, and in use. */
#pragma once

#include "cli/cli.h"

/* The options that ask for these settings. */
#define CLI_FIT_TEXT 256
const char *cli_fit_text(char text[CLI_FIT_TEXT], const struct nb_train_fit *f);

json_t *cli_fit_json(const struct nb_train_fit *f);

/* Says on stderr that nothing fits, and what is the smallest. */
void cli_nothing_fits(double gib, const struct nb_train_fit *smallest);

/* Takes the fastest settings that fit into opts, and says which; those that were given on the
 * command line stay. gib 0: leaves opts alone. Returns an exit code, after saying why. */
int cli_fit(struct nb_train_opts *opts, double gib, const struct cli_command *command,
            const struct cli_common *common);
