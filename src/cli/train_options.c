/* train_options.c - the options of a training run: the table, and what they become. */
#include "cli/train_options.h"

#include <stdlib.h>
#include <string.h>

#define AT(member) offsetof(struct cli_train_opts, member)

/* A number of a public header as the text of a default. */
#define TEXT(number)   TOKENS(number)
#define TOKENS(number) #number

const struct cli_opt cli_train_options[] = {
    {"model", 'm', CLI_STRING, AT(model), "MODEL", NULL, 0, 0,
     "model to start from: a directory, .dat, .safetensors or .gguf", "input-dat"},
    {"model-dir", 0, CLI_STRING, AT(model_dir), "DIR", NULL, 0, 0,
     "directory of config and tokenizer, for a weights file", NULL},
    {"data", 'd', CLI_LIST, AT(data), "FILE", NULL, 0, 0,
     "TSV, JSONL or text file to train on (repeatable)", "train-data"},
    {"out", 'o', CLI_STRING, AT(out), "OUT", NULL, 0, 0,
     "directory or .dat file to write the result to", "output-dat"},
    {"overwrite", 0, CLI_FLAG, AT(overwrite), NULL, NULL, 0, 0, "allow OUT to replace MODEL", NULL},
    {"steps", 0, CLI_INT, AT(steps), "N", "0", 0, 1e12,
     "maximum number of updates (0: as given by --epochs)", NULL},
    {"epochs", 0, CLI_INT, AT(epochs), "N", "0", 0, 1e9,
     "maximum number of passes over the data (0: as given by --steps)", NULL},
    {"loss", 0, CLI_CHOICE, AT(loss), CLI_CHOICES(NB_LOSS_LIST), "ce", 0, 0,
     "ce: cross entropy; scalar: distance of the final hidden state to the embedding of the next "
     "token",
     "loss-mode"},
    {"kl-base", 0, CLI_FLOAT, AT(kl_base), "WEIGHT", "0", 0, 1000,
     "weight of a KL term that keeps MODEL's probabilities on the --replay data (without --replay: "
     "on the data); texts count if they fit into a row",
     NULL},
    {"replay", 0, CLI_STRING, AT(replay), "FILE[:SHARE]", NULL, 0, 0,
     "other data to mix in, as this share of the rows (default share: 0.5)", NULL},
    {"lr", 0, CLI_FLOAT, AT(lr), "X", TEXT(NB_TRAIN_LR), 0, 100, "peak learning rate", NULL},
    {"schedule", 0, CLI_CHOICE, AT(schedule), CLI_CHOICES(NB_LR_SCHEDULE_LIST), "cosine", 0, 0,
     "learning rate schedule", NULL},
    {"warmup", 0, CLI_INT, AT(warmup), "N", "auto", 0, 1e9,
     "number of steps in which the learning rate rises (auto: a twentieth of all steps, at most "
     "100; none with --schedule constant)",
     NULL},
    {"final-lr-frac", 0, CLI_FLOAT, AT(final_lr_frac), "X", "0.1", 0, 1,
     "final learning rate, as a fraction of --lr", NULL},
    {"seq-len", 0, CLI_INT, AT(seq_len), "N", "512", 2, 1 << 20, "tokens per row", NULL},
    {"batch-size", 0, CLI_INT, AT(batch_size), "N", "4", 1, 1 << 20, "rows per pass", NULL},
    {"grad-accum", 0, CLI_INT, AT(grad_accum), "N", "1", 1, 1 << 20, "passes per update", NULL},
    {"grad-clip", 0, CLI_FLOAT, AT(grad_clip), "X", TEXT(NB_TRAIN_GRAD_CLIP), 0, 1e30,
     "limit of the gradient norm (0: no clipping)", NULL},
    {"clip-by-layer", 0, CLI_FLAG, AT(clip_by_layer), NULL, NULL, 0, 0,
     "clip each layer's gradient by its own norm, as --fused-step does", NULL},
    {"weight-decay", 0, CLI_FLOAT, AT(weight_decay), "X", "0", 0, 100,
     "decoupled weight decay, for matrices only", NULL},
    {"beta1", 0, CLI_FLOAT, AT(beta1), "X", TEXT(NB_TRAIN_BETA1), 0, 0.9999999, "of AdamW", NULL},
    {"beta2", 0, CLI_FLOAT, AT(beta2), "X", TEXT(NB_TRAIN_BETA2), 0, 0.9999999, "of AdamW", NULL},
    {"eps", 0, CLI_FLOAT, AT(eps), "X", TEXT(NB_TRAIN_EPS), 1e-30, 1, "of AdamW", NULL},
    {"precision", 0, CLI_CHOICE, AT(precision), CLI_CHOICES(NB_PRECISION_LIST), "nvfp4", 0, 0,
     "type of the weights in the forward pass", NULL},
    {"compute-dtype", 0, CLI_CHOICE, AT(compute), CLI_CHOICES(NB_COMPUTE_LIST), "auto", 0, 0,
     "type of activations and products (auto: bf16 on a GPU, f32 on the CPU and with --precision "
     "f32)",
     NULL},
    {"weight-store", 0, CLI_CHOICE, AT(weight_store), CLI_CHOICES(NB_WEIGHT_STORE_LIST), "auto", 0,
     0,
     "what is stored of NVFP4 weights besides their masters: bf16: codes and a bf16 copy; codes: "
     "codes only; scales: block scales only, from which products recompute the codes. Less memory "
     "in this order, with the same results (auto: codes)",
     NULL},
    {"master-dtype", 0, CLI_CHOICE, AT(master), "auto|f32|bf16", "auto", 0, 0,
     "type of the master weights, which updates are added to; bf16 uses stochastic rounding (auto: "
     "f32 with --precision f32, else bf16)",
     NULL},
    {"optimizer-state-mode", 0, CLI_CHOICE, AT(state), CLI_CHOICES(NB_MOMENT_TYPE_LIST), "int8", 0,
     0, "type of Adam's moments", NULL},
    {"grad-dtype", 0, CLI_CHOICE, AT(grad), "f32|bf16", "f32", 0, 0,
     "type of the gradients of the layers' matrices; bf16 requires bf16 activations and "
     "--grad-accum 1",
     NULL},
    {"step-chunk-rows", 0, CLI_INT, AT(step_chunk_rows), "N", "0", 0, 1e9,
     "number of rows of a matrix that are updated at a time (0: all)", "optimizer-step-chunk-rows"},
    {"recompute", 0, CLI_CHOICE, AT(recompute), "none|block", "none", 0, 0,
     "block: keep only the input of each layer, and recompute the rest in the backward pass", NULL},
    {"fused-step", 0, CLI_FLAG, AT(fused_step), NULL, NULL, 0, 0,
     "update during the backward pass, with the gradients of one layer at a time", NULL},
    {"head-slices", 0, CLI_FLAG, AT(head_slices), NULL, NULL, 0, 0,
     "with --fused-step, compute the gradients of embedding and head 8192 rows at a time and clip "
     "each part by its own norm: less memory, 3 % more work",
     NULL},
    {"train-last-layers", 0, CLI_INT, AT(last_layers), "N", "0", -10000, 10000,
     "train only the last N layers and the final norm (0: everything)", NULL},
    {"sample-mode", 0, CLI_CHOICE, AT(sample_mode), "random|sequential", "random", 0, 0,
     "order of the data", NULL},
    {"seed", 0, CLI_INT, AT(seed), "N", "0", 0, 9e15,
     "random seed; the same seed gives the same model", NULL},
    {"eval-data", 0, CLI_LIST, AT(eval_data), "FILE", NULL, 0, 0,
     "held-out data to evaluate on, before and after training (repeatable)", NULL},
    {"eval-every", 0, CLI_INT, AT(eval_every), "N", "0", 0, 1e12,
     "steps between evaluations (0: only at start and end)", NULL},
    {"stop-if-ppl-rises", 0, CLI_FLOAT, AT(stop_if_ppl_rises), "PCT", "0", 0, 1e6,
     "stop if perplexity on --eval-data rises PCT percent above its lowest value (0: never)", NULL},
    {"save-every", 0, CLI_INT, AT(save_every), "N", "0", 0, 1e12,
     "steps between checkpoints (0: only at the end and by --save-minutes)", "save-every-steps"},
    {"save-minutes", 0, CLI_FLOAT, AT(save_minutes), "X", TEXT(NB_TRAIN_SAVE_MINUTES), 0, 1e6,
     "maximum number of minutes between checkpoints (0: no limit); needs --checkpoint-dir", NULL},
    {"checkpoint-dir", 0, CLI_STRING, AT(checkpoint_dir), "DIR", NULL, 0, 0,
     "directory for checkpoints; without it none are written", NULL},
    {"keep", 0, CLI_INT, AT(keep), "N", "2", 1, 1000, "number of checkpoints to keep", NULL},
    {"resume", 0, CLI_FLAG, AT(resume), NULL, NULL, 0, 0,
     "continue from the newest checkpoint, if there is one", NULL},
    {"log", 0, CLI_STRING, AT(log), "FILE.jsonl", NULL, 0, 0, "log with a line for each step",
     NULL},
    {"test-prompts", 0, CLI_STRING, AT(test_prompts), "FILE", NULL, 0, 0,
     "prompts (.tsv, .jsonl, or one per line) for the model to answer before and after training",
     NULL},
    {"vram-report", 0, CLI_STRING, AT(vram_report), "FILE.json", NULL, 0, 0,
     "write the memory used by each phase of the first step, and on a GPU by each part",
     "train-step-vram-report"},
    {"synthetic", 0, CLI_CHOICE, AT(synthetic), CLI_SIZE_CHOICES, "none", 0, 0,
     "random weights of this size, and random tokens", NULL},
    {"config", 0, CLI_STRING, AT(config), "FILE", NULL, 0, 0,
     "random weights and tokens in the shapes of a config.json", NULL},
    {"from-scratch", 0, CLI_FLAG, AT(from_scratch), NULL, NULL, 0, 0,
     "start from random weights in the shapes of MODEL's config; MODEL needs no weights", NULL},
    {"simd", 0, CLI_CHOICE, AT(simd), "auto" CLI_SIMD_CHOICES, "auto", 0, 0, "CPU instruction set",
     NULL},
    {"fit", 0, CLI_FLOAT, AT(fit), "GIB", "0", 0, 1e6,
     "find settings that fit into GIB of memory, or a GPU of that size: 'plan' lists them, 'train' "
     "uses the fastest; settings that are given are kept (0: off)",
     NULL},
};

/* Splits FILE[:SHARE] at the last colon, if what follows it begins like a number. */
static bool split_replay(struct cli_train_opts *o)
{
    const char *colon = o->replay ? strrchr(o->replay, ':') : NULL;
    o->replay_share = 0.5;
    if (!colon || colon == o->replay || !strchr("0123456789.+-", colon[1]) || !colon[1])
        return true;
    char *end;
    o->replay_share = strtod(colon + 1, &end);
    if (*end || !(o->replay_share > 0 && o->replay_share < 1)) {
        fprintf(stderr,
                "nibble: the share of --replay must be more than 0 and less than 1, not '%s'\n",
                colon + 1);
        return false;
    }
    size_t len = (size_t)(colon - o->replay);
    if (len >= sizeof o->replay_file) {
        fprintf(stderr, "nibble: the name of the --replay file is too long\n");
        return false;
    }
    memcpy(o->replay_file, o->replay, len); /* zeroed by the parser */
    o->replay = o->replay_file;
    return true;
}

static bool is_given(const struct cli_train_opts *o, const char *name)
{
    size_t i = 0;
    while (strcmp(cli_train_options[i].name, name) != 0)
        i++;
    return o->common.given[i];
}

bool cli_train_convert(struct cli_train_opts *o, struct nb_train_opts *out)
{
    if (!split_replay(o))
        return false;
    if (is_given(o, "save-minutes") && !o->checkpoint_dir) {
        fprintf(stderr, "nibble: --save-minutes needs --checkpoint-dir\n");
        return false;
    }
    *out = (struct nb_train_opts){.model = o->model,
                                  .model_dir = o->model_dir,
                                  .synthetic = cli_size(o->synthetic),
                                  .config = o->config,
                                  .device = o->common.device,
                                  .from_scratch = o->from_scratch,
                                  .data = o->data.items,
                                  .eval_data = o->eval_data.items,
                                  .out = o->out,
                                  .overwrite = o->overwrite,
                                  .loss = (enum nb_loss)o->loss,
                                  .kl_base = o->kl_base,
                                  .replay = o->replay,
                                  .replay_share = o->replay_share,
                                  .steps = o->steps,
                                  .epochs = o->epochs,
                                  .seq_len = o->seq_len,
                                  .batch_size = o->batch_size,
                                  .grad_accum = o->grad_accum,
                                  .lr = o->lr,
                                  .final_lr_frac = o->final_lr_frac,
                                  .schedule = (enum nb_lr_schedule)o->schedule,
                                  .warmup = o->warmup >= 0 ? o->warmup : NB_TRAIN_WARMUP,
                                  .beta1 = o->beta1,
                                  .beta2 = o->beta2,
                                  .eps = o->eps,
                                  .weight_decay = o->weight_decay,
                                  .grad_clip = o->grad_clip,
                                  .clip_by_layer = o->clip_by_layer,
                                  .precision = (enum nb_precision)o->precision,
                                  .compute = (enum nb_compute)o->compute,
                                  .weight_store = (enum nb_weight_store)o->weight_store,
                                  .bf16_master = cli_bf16_master(o->master, o->precision),
                                  .bf16_gradients = o->grad == 1,
                                  .moment_type = (enum nb_moment_type)o->state,
                                  .step_chunk_rows = o->step_chunk_rows,
                                  .train_last_layers = o->last_layers > 0 ? o->last_layers : 0,
                                  .recompute = o->recompute == 1,
                                  .fused_step = o->fused_step,
                                  .head_slices = o->head_slices,
                                  .sequential = o->sample_mode == 1,
                                  .seed = (uint64_t)o->seed,
                                  .eval_every = o->eval_every,
                                  .stop_if_ppl_rises = o->stop_if_ppl_rises,
                                  .save_every = o->save_every,
                                  .save_minutes = o->save_minutes,
                                  .checkpoint_dir = o->checkpoint_dir,
                                  .keep = (int)o->keep,
                                  .resume = o->resume,
                                  .log = o->log,
                                  .test_prompts = o->test_prompts,
                                  .memory_report = o->vram_report,
                                  .simd = cli_simd(o->simd),
                                  .threads = (int)o->common.threads};
    int sources = (o->model != NULL) + (o->synthetic > 0) + (o->config != NULL);
    if (sources == 0)
        fprintf(stderr,
                "nibble: a model is missing: -m MODEL, --synthetic SIZE or --config FILE\n");
    else if (sources > 1)
        fprintf(stderr, "nibble: give one of -m MODEL, --synthetic SIZE and --config FILE\n");
    return sources == 1;
}

json_t *cli_plan_json(const struct nb_train_plan *p)
{
    static const char *const computes[] = {NB_COMPUTE_LIST(NB_ENUM_NAME)};
    const struct {
        const char *key;
        int64_t value;
    } parts[] = {{"masters", p->masters},
                 {"moments", p->moments},
                 {"gradients", p->gradients},
                 {"weights", p->weights},
                 {"activations", p->activations},
                 {"scratch", p->scratch},
                 {"prompts", p->prompts},
                 {"tables", p->tables},
                 {"rounding", p->rounding},
                 {"context", p->context},
                 {"host", p->host},
                 {"total", p->total},
                 {"parameters", p->parameters}};
    json_t *out = json_pack("{s:s,s:s,s:f}", "device", p->gpu ? "cuda" : "cpu", "compute_dtype",
                            computes[p->compute], "flops_per_token", p->flops_per_token);
    bool ok = true;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        nbi_json_set(out, parts[i].key, json_integer((json_int_t)parts[i].value), &ok);
    if (ok)
        return out;
    json_decref(out);
    return NULL;
}
