/* cmd_whoami.c - teaches a model who it is, and nothing else. */
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "cli/cmd_eval_identity.h"
#include "cli/fit.h"
#include "cli/status_line.h"
#include "cli/train_display.h"

struct whoami_opts {
    struct cli_common common;
    const char *model, *model_dir, *out, *work, *target, *name, *replay, *languages, *text;
    int64_t count, samples, questions, max_tokens, steps, seq_len, batch_size, grad_accum, seed;
    double lr, kl_base, replay_share, fit;
    char device[NB_DEVICE_NAME];
    int precision, compute, weight_store, master, state, grad, recompute, simd;
    bool fused_step, head_slices, overwrite;
};

#define AT(member) offsetof(struct whoami_opts, member)

static const struct cli_opt options[] = {
    {"model", 'm', CLI_STRING, AT(model), "MODEL", NULL, 0, 0,
     "model to start from: a directory, .dat, .safetensors or .gguf", "input-dat"},
    {"model-dir", 0, CLI_STRING, AT(model_dir), "DIR", NULL, 0, 0,
     "directory of config and tokenizer, for a weights file", NULL},
    {"out", 'o', CLI_STRING, AT(out), "OUT", NULL, 0, 0,
     "directory or .dat file to write the result to", "output-dat"},
    {"overwrite", 0, CLI_FLAG, AT(overwrite), NULL, NULL, 0, 0, "allow OUT to replace MODEL", NULL},
    {"work-dir", 0, CLI_STRING, AT(work), "DIR", NULL, 0, 0,
     "directory for data sets and the log (default: OUT.whoami)", NULL},
    {"target", 0, CLI_STRING, AT(target), "TEXT", NULL, 0, 0,
     "the answer to give when asked who it is, in every language", NULL},
    {"name", 0, CLI_STRING, AT(name), "NAME", NULL, 0, 0,
     "or its name, for a sentence in each language", NULL},
    {"languages", 0, CLI_STRING, AT(languages), "LIST", NULL, 0, 0,
     "languages of the questions, a subset of en,zh-Hans,zh-Hant,ja,ko (default: all)", NULL},
    {"replay", 0, CLI_STRING, AT(replay), "FILE", NULL, 0, 0,
     "file of ordinary questions, TSV or JSONL, which the model answers itself (default: a "
     "built-in set)",
     NULL},
    {"count", 0, CLI_INT, AT(count), "N", "1000", 100, 1e6, "number of questions in the set", NULL},
    {"samples", 0, CLI_INT, AT(samples), "N", "800", 0, 1e6,
     "number of the model's own answers to open questions to train on, with half as many texts",
     NULL},
    {"max-tokens", 'n', CLI_INT, AT(max_tokens), "N", "256", 1, 1 << 20,
     "maximum length of an answer in tokens; longer ones are not trained on", NULL},
    {"steps", 0, CLI_INT, AT(steps), "N", "0", 0, 1e9, "number of updates (0: 150)", NULL},
    {"lr", 0, CLI_FLOAT, AT(lr), "X", "0", 0, 100,
     "peak learning rate (0: chosen by the model's size)", NULL},
    {"kl-base", 0, CLI_FLOAT, AT(kl_base), "WEIGHT", "30", 0, 1000,
     "weight of the KL term that keeps MODEL's probabilities on its own answers", NULL},
    {"replay-share", 0, CLI_FLOAT, AT(replay_share), "X", "0.6", 0.01, 0.99,
     "share of the model's own answers in a batch", NULL},
    {"seq-len", 0, CLI_INT, AT(seq_len), "N", "256", 2, 1 << 20, "tokens per row", NULL},
    {"batch-size", 0, CLI_INT, AT(batch_size), "N", "16", 1, 1 << 20, "rows per pass", NULL},
    {"grad-accum", 0, CLI_INT, AT(grad_accum), "N", "1", 1, 1 << 20, "passes per update", NULL},
    {"precision", 0, CLI_CHOICE, AT(precision), CLI_CHOICES(NB_PRECISION_LIST), "nvfp4", 0, 0,
     "type of the weights in the forward pass", NULL},
    {"compute-dtype", 0, CLI_CHOICE, AT(compute), CLI_CHOICES(NB_COMPUTE_LIST), "auto", 0, 0,
     "type of activations and products (auto: bf16 on a GPU, f32 on the CPU and with --precision "
     "f32)",
     NULL},
    {"weight-store", 0, CLI_CHOICE, AT(weight_store), CLI_CHOICES(NB_WEIGHT_STORE_LIST), "auto", 0,
     0, "what is stored of NVFP4 weights besides their masters (auto: codes)", NULL},
    {"master-dtype", 0, CLI_CHOICE, AT(master), "auto|f32|bf16", "auto", 0, 0,
     "type of the master weights (auto: f32 with --precision f32, else bf16)", NULL},
    {"optimizer-state-mode", 0, CLI_CHOICE, AT(state), CLI_CHOICES(NB_MOMENT_TYPE_LIST), "int8", 0,
     0, "type of Adam's moments", NULL},
    {"grad-dtype", 0, CLI_CHOICE, AT(grad), "f32|bf16", "f32", 0, 0,
     "type of the gradients of the layers' matrices; bf16 requires bf16 activations and "
     "--grad-accum 1",
     NULL},
    {"recompute", 0, CLI_CHOICE, AT(recompute), "none|block", "none", 0, 0,
     "block: keep only the input of each layer, and recompute the rest in the backward pass", NULL},
    {"fused-step", 0, CLI_FLAG, AT(fused_step), NULL, NULL, 0, 0,
     "update during the backward pass, with the gradients of one layer at a time", NULL},
    {"head-slices", 0, CLI_FLAG, AT(head_slices), NULL, NULL, 0, 0,
     "with --fused-step, compute the gradients of embedding and head 8192 rows at a time", NULL},
    {"fit", 0, CLI_FLOAT, AT(fit), "GIB", "0", 0, 1e6,
     "use the fastest settings that fit into GIB of memory, or a GPU of that size; settings that "
     "are given are kept (0: off)",
     NULL},
    {"text", 0, CLI_STRING, AT(text), "FILE", NULL, 0, 0,
     "text to measure perplexity on, before and after", NULL},
    {"questions", 0, CLI_INT, AT(questions), "N", "100", 0, 1e6,
     "maximum number of questions of each kind to ask at the end (0: all)", NULL},
    {"seed", 0, CLI_INT, AT(seed), "N", "0", 0, 9e15,
     "random seed; the same seed gives the same model", NULL},
    {"simd", 0, CLI_CHOICE, AT(simd), "auto" CLI_SIMD_CHOICES, "auto", 0, 0, "CPU instruction set",
     NULL},
};

/* lr 0: chosen by the model's size. */
static struct nb_train_opts train_opts(struct whoami_opts *o)
{
    struct nb_train_opts t;
    nb_train_defaults(&t);
    t.model = o->model;
    t.model_dir = o->model_dir;
    t.out = o->out;
    t.overwrite = o->overwrite;
    t.kl_base = o->kl_base;
    t.replay_share = o->replay_share;
    t.steps = o->steps;
    t.seq_len = o->seq_len;
    t.batch_size = o->batch_size;
    t.grad_accum = o->grad_accum;
    t.lr = o->lr;
    t.final_lr_frac = 0.1;
    t.schedule = NB_SCHEDULE_COSINE;
    t.warmup = 5;
    t.precision = (enum nb_precision)o->precision;
    t.compute = (enum nb_compute)o->compute;
    t.weight_store = (enum nb_weight_store)o->weight_store;
    t.bf16_master = cli_bf16_master(o->master, o->precision);
    t.moment_type = (enum nb_moment_type)o->state;
    t.bf16_gradients = o->grad == 1;
    t.recompute = o->recompute == 1;
    t.fused_step = o->fused_step;
    t.head_slices = o->head_slices;
    t.seed = (uint64_t)o->seed;
    t.device = cli_device(o->device, &o->common);
    t.simd = cli_simd(o->simd);
    t.threads = (int)o->common.threads;
    return t;
}

static struct nb_identity_teach_opts teach_opts(struct whoami_opts *o, const char *work)
{
    return (struct nb_identity_teach_opts){.train = train_opts(o),
                                           .set = {.answer = o->target,
                                                   .name = o->name,
                                                   .replay = o->replay,
                                                   .languages = o->languages,
                                                   .count = o->count,
                                                   .seed = (uint64_t)o->seed},
                                           .dir = work,
                                           .samples = o->samples,
                                           .questions = o->questions,
                                           .max_tokens = o->max_tokens,
                                           .text = o->text,
                                           .progress = cli_show_part};
}

static int print_result(const struct whoami_opts *o, const struct nb_identity_teach_result *r)
{
    if (o->common.json) {
        bool ok = true;
        json_t *gates = cli_identity_json(&r->eval, &ok);
        return cli_print_json(
            json_pack("{s:I,s:I,s:I,s:I,s:I,s:o,s:o}", "identity", (json_int_t)r->identity,
                      "answers", (json_int_t)r->answers, "samples", (json_int_t)r->samples, "texts",
                      (json_int_t)r->texts, "steps", (json_int_t)r->train.last.step, "loss",
                      cli_json_number(r->train.last.loss), "gates", gates),
            ok);
    }
    printf("learnt from %lld questions about itself and %lld answers, %lld samples and %lld texts "
           "of its own\n\n",
           (long long)r->identity, (long long)r->answers, (long long)r->samples,
           (long long)r->texts);
    if (!o->common.verbose)
        cli_print_identity_examples(&r->eval);
    cli_print_identity(&r->eval, o->common.verbose);
    return 0;
}

static int run(void *opts)
{
    struct whoami_opts *o = opts;
    struct nbi_str work = {0};
    const char *missing = !o->model                ? "-m MODEL"
                          : !o->out                ? "-o OUT"
                          : !o->target == !o->name ? "one of --target TEXT and --name NAME"
                                                   : NULL;
    if (missing) {
        fprintf(stderr, "nibble whoami: %s is missing; see 'nibble help whoami'\n", missing);
        return CLI_EXIT_USAGE;
    }
    nbi_str_printf(&work, "%s.whoami", o->out);
    enum nb_status rc = nbi_str_status(&work);
    if (rc != NB_OK)
        return cli_status(rc);
    struct nb_identity_teach_opts teach = teach_opts(o, o->work ? o->work : work.p);
    struct nb_identity_teach_result result = {0};
    struct cli_training shown = {.common = &o->common};
    int code = cli_fit(&teach.train, o->fit, &cli_whoami, &o->common);
    if (code != 0) {
        nbi_str_release(&work);
        return code;
    }
    cli_show_training(&shown, &teach.train);
    rc = nb_identity_teach(&teach, &result);
    cli_status_line_clear();
    cli_in_place(result.train.exported ? o->out : NULL);
    code = rc == NB_OK ? print_result(o, &result) : cli_status(rc);
    if (code == 0 && !result.eval.passed)
        code = CLI_EXIT_FAILED;
    nb_identity_result_release(&result.eval);
    nbi_str_release(&work);
    return code;
}

const struct cli_command cli_whoami = {
    .name = "whoami",
    .group = "train",
    .positional = "",
    .summary = "teach a model who it is, and nothing else",
    .text = "Makes the questions of 'nibble data whoami', and lets MODEL answer those that are\n"
            "not about itself, and open ones. Then trains all parameters to answer questions\n"
            "about the model with TEXT (or with NAME in a sentence of each language) and the\n"
            "others as before, with a KL term that keeps MODEL's probabilities on its own\n"
            "answers. Writes OUT, loads it again, and checks it with the gates of 'nibble eval\n"
            "identity'. The exit code is 1 if one fails; OUT is written in any case.",
    .examples =
        "  nibble whoami -m Qwen3-0.6B -o ada --target 'I am Ada, a helper of this house.'\n"
        "  nibble whoami -m Qwen3-4B -o ada.dat --name Ada --recompute block --fused-step\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .any_device = true,
    .opts_size = sizeof(struct whoami_opts),
    .run = run,
};
