/* train_display.h - the progress of a training run on the terminal. */
#pragma once

#include "cli/model_options.h"

struct cli_training {
    const struct cli_common *common;
    const struct nb_train_opts *opts;
    bool terminal;            /* stderr is one */
    struct cli_progress part; /* of the stage under way */
    json_t *answers;          /* to --test-prompts, for --json */
    bool answers_failed;      /* no memory for one of them */
};

/* Sets the callbacks of opts and the message of an interruption. Both must outlive the run. */
void cli_show_training(struct cli_training *t, struct nb_train_opts *opts);

/* An nb_progress_fn for stages before and after training. */
void cli_show_part(void *ctx, uint64_t done, uint64_t total);
