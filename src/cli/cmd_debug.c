/* cmd_debug.c - numbers for comparing with another implementation. */
#include <string.h>

#include "cli/model_options.h"

struct debug_opts {
    struct cli_common common;
    struct cli_run_opts run;
    const char *in, *out;
    int precision, compute;
};

static const struct cli_opt options[] = {
    CLI_MODEL_OPTIONS(struct debug_opts, run),
    {"in", 0, CLI_STRING, offsetof(struct debug_opts, in), "FILE", NULL, 0, 0,
     "a .safetensors file with input_ids and labels, int32 [B, T]", NULL},
    {"out", 'o', CLI_STRING, offsetof(struct debug_opts, out), "FILE", NULL, 0, 0,
     "the .safetensors file to write", NULL},
    {"precision", 0, CLI_CHOICE, offsetof(struct debug_opts, precision), "f32", "f32", 0, 0,
     "precision of the computation", NULL},
    {"compute-dtype", 0, CLI_CHOICE, offsetof(struct debug_opts, compute), "f32|bf16", "f32", 0, 0,
     "type of activations and products for gradients and updates", NULL},
};

static int run(void *opts)
{
    struct debug_opts *o = opts;
    struct nb_engine *engine = NULL;
    if (!o->run.model || !o->in || !o->out) {
        fprintf(stderr, "nibble debug: %s is missing; see 'nibble help debug'\n",
                !o->run.model ? "-m MODEL"
                : !o->in      ? "--in FILE"
                              : "--out FILE");
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = cli_engine_open(&engine, &o->run, &o->common);
    if (rc == NB_OK)
        rc = nb_eval_hf(engine, o->in, o->compute == 1, o->out, NULL);
    nb_engine_close(engine);
    return cli_status(rc);
}

const struct cli_command cli_debug = {
    .name = "debug",
    .group = "diagnose",
    .positional = "WHAT",
    .what = "hf",
    .summary = "write intermediate results for comparison with Hugging Face",
    .text = "hf: reads input_ids and labels (int32 [B, T], -100 is ignored) and writes logits [B,\n"
            "T, V], loss [1] (the mean over labelled positions, with the next-token shift of\n"
            "Hugging Face) and greedy.ids (the first 8 ids of row 0, then 48 greedy tokens\n"
            "through the cache), all computed in f32 from the weights as stored. It also writes\n"
            "grad.NAME for every parameter and, after three steps of AdamW, adamw3.losses and\n"
            "adamw3.NAME. If the GPU cannot train, these are computed on the CPU. With\n"
            "--compute-dtype bf16, gradients and updates are those of a bf16 pass.",
    .examples = "  nibble debug hf -m tiny --in in.safetensors --out out.safetensors\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct debug_opts),
    .any_device = true,
    .run = run,
};
