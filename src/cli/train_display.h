/* train_display.h - how the commands that train show it. */
#pragma once

#include "cli/model_options.h"

struct cli_training {
    const struct cli_common *common;
    const struct nb_train_opts *opts;
    bool terminal, drawn; /* stderr is one; its last line is to be drawn over */
    json_t *answers;      /* to --test-prompts, for --json */
    bool answers_failed;  /* memory was out for one */
};

/* Sets the callbacks of opts, and what an interruption says. Both must outlive the run. */
void cli_show_training(struct cli_training *t, struct nb_train_opts *opts);
void cli_end_training(struct cli_training *t);

/* An nb_progress_fn of a part before or after training. */
void cli_show_part(void *ctx, uint64_t done, uint64_t total);
