/* cmd_synth.c - a random model of real shapes. */
#include <string.h>

#include "base/file.h"
#include "base/str.h"
#include "cli/cli.h"

struct synth_opts {
    struct cli_common common;
    const char *config;
    int dtype;
    int64_t seed;
    double sigma;
};

static const struct cli_opt options[] = {
    {"config", 0, CLI_STRING, offsetof(struct synth_opts, config), "FILE", NULL, 0, 0,
     "a config.json, instead of SIZE; the tokenizer next to it is copied", NULL},
    {"dtype", 0, CLI_CHOICE, offsetof(struct synth_opts, dtype), "bf16|f16|f32", "bf16", 0, 0,
     "type of the weights", NULL},
    {"seed", 0, CLI_INT, offsetof(struct synth_opts, seed), "N", "0", 0, 9e15,
     "random seed; the same seed gives the same model", NULL},
    {"sigma", 0, CLI_FLOAT, offsetof(struct synth_opts, sigma), "X", NULL, 1e-6, 10,
     "standard deviation of the weights (default: initializer_range of the config)", NULL},
};

static int run(void *opts)
{
    struct synth_opts *o = opts;
    static const enum nb_out_dtype dtypes[] = {NB_OUT_BF16, NB_OUT_F16, NB_OUT_F32};
    const char *const *p = o->common.positional;
    const char *preset = o->config ? NULL : p[0], *dst = o->config ? p[0] : p[1];
    if (!dst || (o->config && p[1])) {
        fprintf(stderr, "nibble synth: give SIZE and DIR, or --config FILE and DIR; "
                        "see 'nibble help synth'\n");
        return CLI_EXIT_USAGE;
    }
    struct cli_progress progress;
    cli_progress_start(&progress, &o->common, "synth");
    struct nb_synth_opts to = {.preset = preset,
                               .config = o->config,
                               .dst = dst,
                               .dtype = dtypes[o->dtype],
                               .seed = (uint64_t)o->seed,
                               .sigma = (float)o->sigma,
                               .threads = (int)o->common.threads,
                               .progress = cli_progress_update,
                               .progress_ctx = &progress};
    enum nb_status rc = nb_synth(&to);
    cli_progress_end(&progress);
    cli_in_place(rc == NB_OK ? dst : NULL);
    if (rc == NB_OK && o->common.json)
        return cli_print_json(json_pack("{s:o}", "dst", cli_json_path(dst)), true);
    if (rc == NB_OK && !o->common.quiet)
        printf("wrote %s\n", dst);
    int code = cli_status(rc);
    return rc == NB_EINVAL ? CLI_EXIT_USAGE : code;
}

const struct cli_command cli_synth = {
    .name = "synth",
    .group = "convert",
    .positional = "[SIZE] [DIR]",
    .summary = "make a model with random weights, for tests and benchmarks",
    .text = "Writes a model directory with normally distributed weights in the shapes of a Qwen3\n"
            "model. SIZE is tiny, 0.6b, 1.7b, 4b, 8b, 14b or 32b. The model produces no sensible\n"
            "text, but has the size, layout and statistics of a real one.",
    .examples = "  nibble synth tiny tiny-model\n"
                "  nibble synth --config Qwen3-4B/config.json random-4b\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct synth_opts),
    .run = run,
};
