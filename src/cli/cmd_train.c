/* cmd_train.c - full-parameter training, and the plan of it. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "cli/model_options.h"
#include "cli/plan_fit.h"
#include "cli/train_display.h"

struct train_opts {
    struct cli_common common;
    const char *model, *model_dir, *out, *synthetic, *checkpoint_dir, *log, *replay;
    const char *test_prompts, *vram_report;
    struct cli_list data, eval_data;
    int64_t steps, epochs, seq_len, batch_size, grad_accum, warmup, step_chunk_rows, last_layers;
    int64_t seed, eval_every, save_every, keep;
    double lr, final_lr_frac, beta1, beta2, eps, weight_decay, grad_clip, stop_if_ppl_rises;
    double kl_base, replay_share, fit;
    int loss, schedule, precision, master, state, recompute, sample_mode, simd;
    char replay_file[PATH_MAX]; /* replay without its share */
    bool fused_step, clip_by_layer, resume, overwrite, from_scratch;
    bool terminal, drawn; /* stderr is one; its last line is to be drawn over */
    json_t *answers;      /* to --test-prompts, for --json */
};

#define AT(member) offsetof(struct train_opts, member)

/* A number of nibble.h as the text of a default. */
#define TEXT(number)   TOKENS(number)
#define TOKENS(number) #number

static const struct cli_opt options[] = {
    {"model", 'm', CLI_STRING, AT(model), "MODEL", NULL, 0, 0,
     "directory, .dat, .safetensors or .gguf to start from", "input-dat"},
    {"model-dir", 0, CLI_STRING, AT(model_dir), "DIR", NULL, 0, 0,
     "config and tokenizer of a bare weights file", NULL},
    {"data", 'd', CLI_LIST, AT(data), "FILE", NULL, 0, 0,
     "TSV, JSONL or text to train on; may be given again", "train-data"},
    {"out", 'o', CLI_STRING, AT(out), "OUT", NULL, 0, 0, "a directory or .dat for the result",
     "output-dat"},
    {"overwrite", 0, CLI_FLAG, AT(overwrite), NULL, NULL, 0, 0, "OUT may be the model that is read",
     NULL},
    {"steps", 0, CLI_INT, AT(steps), "N", "0", 0, 1e12, "updates at most (0: as --epochs says)",
     NULL},
    {"epochs", 0, CLI_INT, AT(epochs), "N", "0", 0, 1e9,
     "passes over the data at most (0: as --steps says)", NULL},
    {"loss", 0, CLI_CHOICE, AT(loss), CLI_CHOICES(NB_LOSS_LIST), "ce", 0, 0,
     "scalar: distance of the final hidden state to the embedding of the next token", "loss-mode"},
    {"kl-base", 0, CLI_FLOAT, AT(kl_base), "WEIGHT", "0", 0, 1000,
     "hold to what MODEL thinks of --replay, or of the data; of texts, those that fit into a row",
     NULL},
    {"replay", 0, CLI_STRING, AT(replay), "FILE[:SHARE]", NULL, 0, 0,
     "other data to mix in: this share of the rows (0.5 if not given)", NULL},
    {"lr", 0, CLI_FLOAT, AT(lr), "X", TEXT(NB_TRAIN_LR), 0, 100, "learning rate, the highest",
     NULL},
    {"schedule", 0, CLI_CHOICE, AT(schedule), CLI_CHOICES(NB_LR_SCHEDULE_LIST), "cosine", 0, 0,
     "how it changes", NULL},
    {"warmup", 0, CLI_INT, AT(warmup), "N", "0", 0, 1e9, "steps in which it rises", NULL},
    {"final-lr-frac", 0, CLI_FLOAT, AT(final_lr_frac), "X", "0.1", 0, 1,
     "what is left of it at the end", NULL},
    {"seq-len", 0, CLI_INT, AT(seq_len), "N", "512", 2, 1 << 20, "tokens of a row", NULL},
    {"batch-size", 0, CLI_INT, AT(batch_size), "N", "4", 1, 1 << 20, "rows of a pass", NULL},
    {"grad-accum", 0, CLI_INT, AT(grad_accum), "N", "1", 1, 1 << 20, "passes of an update", NULL},
    {"grad-clip", 0, CLI_FLOAT, AT(grad_clip), "X", TEXT(NB_TRAIN_GRAD_CLIP), 0, 1e30,
     "largest norm of the gradient (0: any)", NULL},
    {"clip-by-layer", 0, CLI_FLAG, AT(clip_by_layer), NULL, NULL, 0, 0,
     "each layer's gradient by its own norm, as --fused-step does", NULL},
    {"weight-decay", 0, CLI_FLOAT, AT(weight_decay), "X", "0", 0, 100, "of matrices, decoupled",
     NULL},
    {"beta1", 0, CLI_FLOAT, AT(beta1), "X", TEXT(NB_TRAIN_BETA1), 0, 0.9999999, "of AdamW", NULL},
    {"beta2", 0, CLI_FLOAT, AT(beta2), "X", TEXT(NB_TRAIN_BETA2), 0, 0.9999999, "of AdamW", NULL},
    {"eps", 0, CLI_FLOAT, AT(eps), "X", TEXT(NB_TRAIN_EPS), 1e-30, 1, "of AdamW", NULL},
    {"precision", 0, CLI_CHOICE, AT(precision), CLI_CHOICES(NB_PRECISION_LIST), "nvfp4", 0, 0,
     "the weights that the forward pass sees", NULL},
    {"master-dtype", 0, CLI_CHOICE, AT(master), "auto|f32|bf16", "auto", 0, 0,
     "the weights that updates go to; bf16 is rounded stochastically (auto: f32 with --precision "
     "f32, else bf16)",
     NULL},
    {"optimizer-state-mode", 0, CLI_CHOICE, AT(state), CLI_CHOICES(NB_MOMENT_TYPE_LIST), "int8", 0,
     0, "Adam's moments", NULL},
    {"step-chunk-rows", 0, CLI_INT, AT(step_chunk_rows), "N", "0", 0, 1e9,
     "rows of a matrix that are updated at a time (0: all)", "optimizer-step-chunk-rows"},
    {"recompute", 0, CLI_CHOICE, AT(recompute), "none|block", "none", 0, 0,
     "block: keep only what goes into each layer, and compute the rest again", NULL},
    {"fused-step", 0, CLI_FLAG, AT(fused_step), NULL, NULL, 0, 0,
     "update inside the backward pass, with one layer's gradients at a time", NULL},
    {"train-last-layers", 0, CLI_INT, AT(last_layers), "N", "0", 0, 10000,
     "only so many, and the final norm (0: everything)", NULL},
    {"sample-mode", 0, CLI_CHOICE, AT(sample_mode), "random|sequential", "random", 0, 0,
     "the order of the data", NULL},
    {"seed", 0, CLI_INT, AT(seed), "N", "0", 0, 9e15, "the same seed gives the same model", NULL},
    {"eval-data", 0, CLI_LIST, AT(eval_data), "FILE", NULL, 0, 0,
     "held-out data to measure on; may be given again", NULL},
    {"eval-every", 0, CLI_INT, AT(eval_every), "N", "0", 0, 1e12, "steps (0: at the end)", NULL},
    {"stop-if-ppl-rises", 0, CLI_FLOAT, AT(stop_if_ppl_rises), "PCT", "0", 0, 1e6,
     "stop when perplexity on --eval-data is so many per cent over its lowest (0: go on)", NULL},
    {"save-every", 0, CLI_INT, AT(save_every), "N", "0", 0, 1e12,
     "steps between checkpoints (0: at the end)", "save-every-steps"},
    {"checkpoint-dir", 0, CLI_STRING, AT(checkpoint_dir), "DIR", NULL, 0, 0,
     "where checkpoints go; none without it", NULL},
    {"keep", 0, CLI_INT, AT(keep), "N", "2", 1, 1000, "checkpoints to keep", NULL},
    {"resume", 0, CLI_FLAG, AT(resume), NULL, NULL, 0, 0,
     "go on from the newest checkpoint, if there is one", NULL},
    {"log", 0, CLI_STRING, AT(log), "FILE.jsonl", NULL, 0, 0, "a line for every step", NULL},
    {"test-prompts", 0, CLI_STRING, AT(test_prompts), "FILE", NULL, 0, 0,
     "prompts (.tsv, .jsonl, or one a line) that the model answers before and after", NULL},
    {"vram-report", 0, CLI_STRING, AT(vram_report), "FILE.json", NULL, 0, 0,
     "memory by phases of the first step", "train-step-vram-report"},
    {"synthetic", 0, CLI_STRING, AT(synthetic), "SIZE", NULL, 0, 0,
     "random weights and tokens: tiny, 0.6b, 1.7b, 4b or 8b", NULL},
    {"from-scratch", 0, CLI_FLAG, AT(from_scratch), NULL, NULL, 0, 0,
     "random weights in the shapes of the model's config: MODEL may be without any", NULL},
    {"simd", 0, CLI_CHOICE, AT(simd), "auto" CLI_SIMD_CHOICES, "auto", 0, 0,
     "instruction set of the CPU", NULL},
    /* The last row is of 'plan' alone. */
    {"fit", 0, CLI_FLOAT, AT(fit), "GIB", "0", 0, 1e6,
     "also list settings that take at most so much memory (0: do not)", NULL},
};

#define OPTION_COUNT (sizeof options / sizeof *options)

/* FILE[:SHARE]: what stands behind the last colon, if it begins like a number. */
static bool split_replay(struct train_opts *o)
{
    const char *colon = o->replay ? strrchr(o->replay, ':') : NULL;
    o->replay_share = 0.5;
    if (!colon || colon == o->replay || !strchr("0123456789.+-", colon[1]) || !colon[1])
        return true;
    char *end;
    o->replay_share = strtod(colon + 1, &end);
    if (*end || !(o->replay_share > 0 && o->replay_share < 1)) {
        fprintf(stderr, "nibble: the share of --replay is over 0 and less than 1, not '%s'\n",
                colon + 1);
        return false;
    }
    size_t len = (size_t)(colon - o->replay);
    if (len >= sizeof o->replay_file) {
        fprintf(stderr, "nibble: the name of the --replay file is too long\n");
        return false;
    }
    memcpy(o->replay_file, o->replay, len); /* all zero before */
    o->replay = o->replay_file;
    return true;
}

static bool convert(struct train_opts *o, struct nb_train_opts *out)
{
    if (!split_replay(o))
        return false;
    *out = (struct nb_train_opts){.model = o->model,
                                  .model_dir = o->model_dir,
                                  .synthetic = o->synthetic,
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
                                  .warmup = o->warmup,
                                  .beta1 = o->beta1,
                                  .beta2 = o->beta2,
                                  .eps = o->eps,
                                  .weight_decay = o->weight_decay,
                                  .grad_clip = o->grad_clip,
                                  .clip_by_layer = o->clip_by_layer,
                                  .precision = (enum nb_precision)o->precision,
                                  .bf16_master = cli_bf16_master(o->master, o->precision),
                                  .moment_type = (enum nb_moment_type)o->state,
                                  .step_chunk_rows = o->step_chunk_rows,
                                  .train_last_layers = o->last_layers,
                                  .recompute = o->recompute == 1,
                                  .fused_step = o->fused_step,
                                  .sequential = o->sample_mode == 1,
                                  .seed = (uint64_t)o->seed,
                                  .eval_every = o->eval_every,
                                  .stop_if_ppl_rises = o->stop_if_ppl_rises,
                                  .save_every = o->save_every,
                                  .checkpoint_dir = o->checkpoint_dir,
                                  .keep = (int)o->keep,
                                  .resume = o->resume,
                                  .log = o->log,
                                  .test_prompts = o->test_prompts,
                                  .memory_report = o->vram_report,
                                  .simd = cli_simd(o->simd),
                                  .threads = (int)o->common.threads};
    if (!o->model && !o->synthetic)
        fprintf(stderr, "nibble: a model is missing: -m MODEL, or --synthetic SIZE\n");
    else if (o->model && o->synthetic)
        fprintf(stderr, "nibble: --synthetic stands in place of -m MODEL\n");
    else
        return true;
    return false;
}

/* ---- train ---- */

static json_t *plan_json(const struct nb_train_plan *p)
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f}", "masters", (json_int_t)p->masters,
                     "moments", (json_int_t)p->moments, "gradients", (json_int_t)p->gradients,
                     "weights", (json_int_t)p->weights, "activations", (json_int_t)p->activations,
                     "scratch", (json_int_t)p->scratch, "host", (json_int_t)p->host, "total",
                     (json_int_t)p->total, "parameters", (json_int_t)p->parameters,
                     "flops_per_token", p->flops_per_token);
}

static json_t *result_json(const struct nb_train_result *r)
{
    json_t *eval =
        r->eval.tokens > 0
            ? json_pack("{s:I,s:I,s:o,s:o,s:o}", "step", (json_int_t)r->eval.step, "tokens",
                        (json_int_t)r->eval.tokens, "loss", cli_json_number(r->eval.loss), "ppl",
                        cli_json_number(exp(r->eval.loss)), "master_loss",
                        cli_json_number(r->eval.master_loss))
            : json_null();
    return json_pack(
        "{s:I,s:o,s:o,s:o,s:I,s:I,s:o,s:o,s:I,s:b,s:b,s:I}", "steps", (json_int_t)r->last.step,
        "loss", cli_json_number(r->last.loss), "kl", cli_json_number(r->last.kl), "tokens_per_s",
        cli_json_number(r->last.tokens_per_s), "tokens", (json_int_t)r->last.tokens, "skipped",
        (json_int_t)r->last.skipped, "eval", eval, "plan", plan_json(&r->plan), "peak_bytes",
        (json_int_t)r->peak_bytes, "stopped", r->stopped, "interrupted", r->interrupted,
        "result_step", (json_int_t)r->result_step);
}

static void print_stopped(const struct train_opts *o, const struct nb_train_result *r)
{
    printf("stopped: perplexity has risen");
    if (o->out && o->checkpoint_dir)
        printf("; '%s' is the model of step %lld, the last before that", o->out,
               (long long)r->result_step);
    else if (o->out)
        printf("; '%s' is the model of step %lld, in which it has (with --checkpoint-dir it is the "
               "last before that)",
               o->out, (long long)r->result_step);
    putchar('\n');
}

static int run_train(void *opts)
{
    struct train_opts *o = opts;
    struct nb_train_opts t;
    struct nb_train_result r;
    struct cli_training shown = {.common = &o->common};
    if (!convert(o, &t))
        return CLI_EXIT_USAGE;
    if (nb_train_check(&t) != NB_OK) {
        fprintf(stderr, "nibble: %s\n", nb_last_error());
        return CLI_EXIT_USAGE;
    }
    cli_show_training(&shown, &t);
    enum nb_status rc = nb_train(&t, &r);
    cli_end_training(&shown);
    if (rc != NB_OK) {
        json_decref(shown.answers);
        return cli_status(rc);
    }
    cli_in_place(r.exported ? o->out : NULL);
    if (r.interrupted && r.exported)
        fprintf(stderr, "nibble: interrupted after the last step; '%s' is in place\n", o->out);
    else if (r.interrupted)
        fprintf(stderr, "nibble: interrupted after step %lld%s\n", (long long)r.last.step,
                o->checkpoint_dir ? "; --resume goes on from there"
                                  : "; without --checkpoint-dir nothing is kept");
    if (o->common.json) {
        json_t *all = result_json(&r);
        bool ok = all != NULL;
        if (shown.answers)
            nbi_json_set(all, "answers", shown.answers, &ok);
        int code = cli_print_json(all, ok && !shown.answers_failed);
        return code == 0 && r.interrupted ? cli_interrupted() : code;
    }
    if (r.interrupted)
        return cli_interrupted();
    if (r.stopped)
        print_stopped(o, &r);
    printf("%lld steps", (long long)r.last.step);
    if (isfinite(r.last.loss))
        printf(", loss %.4f", r.last.loss);
    if (r.last.skipped > 0)
        printf(", %lld skipped: their gradients were not finite", (long long)r.last.skipped);
    putchar('\n');
    return 0;
}

const struct cli_command cli_train = {
    .name = "train",
    .group = "train",
    .positional = "",
    .summary = "train every parameter of a model",
    .text =
        "Starts from MODEL, trains on the data and writes OUT. In NVFP4 the forward pass uses\n"
        "the four-bit weights that will be written, and updates go to master weights. Memory\n"
        "is taken at the start, as 'nibble plan' says. Ctrl-C, SIGTERM and SIGHUP finish the\n"
        "step, write a checkpoint if there is a directory for it, and stop; --resume goes on,\n"
        "bit for bit.\n"
        "\n"
        "Against forgetting: --replay mixes in other data, and --kl-base adds WEIGHT times\n"
        "KL(MODEL || the model in training) to the loss of its labelled tokens. What MODEL\n"
        "thinks of them is computed once at the start (and again by --resume, which needs the\n"
        "same MODEL): the 64 most likely tokens and the rest as one. If that is over 64 MiB, it\n"
        "goes to a file without a name beside the checkpoints or OUT. Epochs count --data.\n"
        "\n"
        "--stop-if-ppl-rises looks at the model as it is read, every --eval-every steps and at\n"
        "the end. A perplexity that is not a number has risen. OUT is then the last model that\n"
        "was within the limit, which is kept as good.ckpt in --checkpoint-dir; without that\n"
        "directory it is the model in which perplexity has risen, and the last line says so.",
    .examples =
        "  nibble train -m Qwen3-0.6B -d chat.jsonl -o tuned --epochs 1 --eval-data held.jsonl\n"
        "  nibble train -m Qwen3-0.6B -d chat.jsonl -o tuned.dat --steps 500 \\\n"
        "      --checkpoint-dir ckpt --save-every 50 --resume --log run.jsonl\n"
        "  nibble train -m Qwen3-0.6B -d who.tsv -o tuned --epochs 3 \\\n"
        "      --replay general.jsonl:0.75 --kl-base 0.5\n",
    .options = options,
    .option_count = OPTION_COUNT - 1,
    .opts_size = sizeof(struct train_opts),
    .run = run_train,
};

/* ---- plan ---- */

static void print_plan(const struct nb_train_plan *p)
{
    const struct {
        const char *what;
        int64_t bytes;
    } parts[] = {{"master weights", p->masters},  {"weights of the forward pass", p->weights},
                 {"Adam's moments", p->moments},  {"gradients", p->gradients},
                 {"activations", p->activations}, {"scratch", p->scratch},
                 {"batches and tables", p->host}, {"total", p->total}};
    char text[32];
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        printf("%-28s  %12s\n", parts[i].what, nbi_format_bytes(text, (double)parts[i].bytes));
    printf("\n%lld parameters, %.2f GFLOP a token\n", (long long)p->parameters,
           p->flops_per_token / 1e9);
}

static int run_plan(void *opts)
{
    struct train_opts *o = opts;
    struct nb_train_opts t;
    struct nb_train_plan p;
    if (!convert(o, &t))
        return CLI_EXIT_USAGE;
    enum nb_status rc = nb_train_plan(&t, &p);
    if (rc != NB_OK)
        return cli_status(rc);
    if (o->common.json && o->fit <= 0)
        return cli_print_json(plan_json(&p), true);
    if (o->common.json)
        return cli_plan_fit_json(&t, o->fit, plan_json(&p));
    print_plan(&p);
    return o->fit > 0 ? cli_plan_fit(&t, o->fit) : 0;
}

const struct cli_command cli_plan = {
    .name = "plan",
    .group = "train",
    .positional = "",
    .summary = "say what memory a training run takes",
    .text =
        "Takes the options of 'nibble train' and says what it would allocate, by part, without\n"
        "running it.\n"
        "\n"
        "--fit also tries all of --recompute, --optimizer-state-mode, --master-dtype,\n"
        "--fused-step and smaller batches (which accumulate to the same update, but with\n"
        "--fused-step), and lists what fits: at most ten lines, the fastest first, then the most\n"
        "precise, and none that another is as good as in every respect. If nothing does, it says\n"
        "what is the smallest, and the exit code is 1.",
    .examples = "  nibble plan -m Qwen3-4B --precision nvfp4 --recompute block --fused-step\n"
                "  nibble plan -m Qwen3-4B --fit 16\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .opts_size = sizeof(struct train_opts),
    .run = run_plan,
};
