/* train_options.h - the options of a training run, which 'train' and 'plan' share. */
#pragma once

#include <limits.h>

#include "cli/model_options.h"

struct cli_train_opts {
    struct cli_common common;
    const char *model, *model_dir, *out, *config, *checkpoint_dir, *log, *replay;
    const char *test_prompts, *vram_report;
    struct cli_list data, eval_data;
    int64_t steps, epochs, seq_len, batch_size, grad_accum, warmup, step_chunk_rows, last_layers;
    int64_t seed, eval_every, save_every, keep;
    double lr, final_lr_frac, beta1, beta2, eps, weight_decay, grad_clip, stop_if_ppl_rises;
    double kl_base, replay_share, fit, save_minutes;
    int synthetic, loss, schedule, precision, compute, weight_store, master, state, recompute;
    int grad, sample_mode, simd;
    char device[NB_DEVICE_NAME];
    char replay_file[PATH_MAX]; /* --replay without its share */
    bool fused_step, head_slices, clip_by_layer, resume, overwrite, from_scratch;
};

#define CLI_TRAIN_OPTIONS 52

extern const struct cli_opt cli_train_options[CLI_TRAIN_OPTIONS];

/* The library's options from those of the command line, whose strings they borrow; false after
 * having said what is wrong. Splits --replay in place. */
bool cli_train_convert(struct cli_train_opts *o, struct nb_train_opts *out);

/* A plan as a JSON object; NULL: no memory for it. */
json_t *cli_plan_json(const struct nb_train_plan *p);
