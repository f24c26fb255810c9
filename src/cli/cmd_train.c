/* cmd_train.c - full-parameter training. */
#include <math.h>

#include "base/str.h"
#include "cli/fit.h"
#include "cli/status_line.h"
#include "cli/train_display.h"
#include "cli/train_options.h"

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
        "{s:s,s:I,s:o,s:o,s:o,s:I,s:I,s:o,s:o,s:I,s:b,s:b,s:I}", "device", r->device, "steps",
        (json_int_t)r->last.step, "loss", cli_json_number(r->last.loss), "kl",
        cli_json_number(r->last.kl), "tokens_per_s", cli_json_number(r->last.tokens_per_s),
        "tokens", (json_int_t)r->last.tokens, "skipped", (json_int_t)r->last.skipped, "eval", eval,
        "plan", cli_plan_json(&r->plan), "peak_bytes", (json_int_t)r->peak_bytes, "stopped",
        r->stopped, "interrupted", r->interrupted, "result_step", (json_int_t)r->result_step);
}

static void print_stopped(const struct cli_train_opts *o, const struct nb_train_result *r)
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
    struct cli_train_opts *o = opts;
    struct nb_train_opts t;
    struct nb_train_result r;
    struct cli_training shown = {.common = &o->common};
    if (!cli_train_convert(o, &t))
        return CLI_EXIT_USAGE;
    if (nb_train_check(&t) != NB_OK) {
        fprintf(stderr, "nibble: %s\n", nb_last_error());
        return CLI_EXIT_USAGE;
    }
    t.device = cli_device(o->device, &o->common);
    int code = cli_fit(&t, o->fit, &cli_train, &o->common);
    if (code != 0)
        return code;
    cli_show_training(&shown, &t);
    enum nb_status rc = nb_train(&t, &r);
    cli_status_line_clear();
    if (rc != NB_OK) {
        json_decref(shown.answers);
        return cli_status(rc);
    }
    cli_in_place(r.exported ? o->out : NULL);
    if (r.interrupted && r.exported)
        fprintf(stderr, "nibble: interrupted after the last step; '%s' is in place\n", o->out);
    else if (r.interrupted)
        fprintf(stderr, "nibble: interrupted after step %lld%s\n", (long long)r.last.step,
                o->checkpoint_dir ? "; --resume continues from there"
                                  : "; without --checkpoint-dir nothing is kept");
    if (o->common.json) {
        json_t *all = result_json(&r);
        bool ok = all != NULL;
        if (shown.answers)
            nbi_json_set(all, "answers", shown.answers, &ok);
        code = cli_print_json(all, ok && !shown.answers_failed);
        return code == 0 && r.interrupted ? cli_interrupted() : code;
    }
    if (r.interrupted)
        return cli_interrupted();
    if (r.stopped)
        print_stopped(o, &r);
    printf("%lld step%s", (long long)r.last.step, nbi_plural(r.last.step));
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
    .summary = "train all parameters of a model",
    .text = "Starts from MODEL, trains on the data and writes OUT. In NVFP4 the forward pass uses\n"
            "the four-bit weights that will be written, and updates are added to master weights.\n"
            "All memory is allocated at the start; 'nibble plan' shows how much. Ctrl-C, SIGTERM\n"
            "and SIGHUP finish the step, write a checkpoint if --checkpoint-dir is given, and\n"
            "stop; --resume continues, bit for bit. On another device or with another version of\n"
            "cuBLAS it continues as well, and warns that bits may differ.\n"
            "\n"
            "Two options reduce forgetting: --replay mixes in other data, and --kl-base adds\n"
            "WEIGHT times KL(MODEL || the model in training) to the loss of its labelled tokens.\n"
            "The probabilities of MODEL are computed once at the start (and again by --resume,\n"
            "which needs the same MODEL): those of the 64 most likely tokens, and the sum of the\n"
            "others. If they take more than 64 MiB, they are kept in an unnamed file next to the\n"
            "checkpoints or OUT. Epochs count --data only.\n"
            "\n"
            "--stop-if-ppl-rises evaluates MODEL before training, then the trained model every\n"
            "--eval-every steps and at the end. A perplexity that is NaN counts as risen. OUT is\n"
            "then the last model within the limit, which is kept as good.ckpt in\n"
            "--checkpoint-dir. Without that directory, OUT is the model whose perplexity has\n"
            "risen, and the last line of the output says so.",
    .examples =
        "  nibble train -m Qwen3-0.6B -d chat.jsonl -o tuned --epochs 1 --eval-data held.jsonl\n"
        "  nibble train -m Qwen3-0.6B -d chat.jsonl -o tuned.dat --steps 500 \\\n"
        "      --checkpoint-dir ckpt --save-every 50 --resume --log run.jsonl\n"
        "  nibble train -m Qwen3-0.6B -d who.tsv -o tuned --epochs 3 \\\n"
        "      --replay general.jsonl:0.75 --kl-base 0.5\n",
    .options = cli_train_options,
    .option_count = CLI_TRAIN_OPTIONS,
    .any_device = true,
    .opts_size = sizeof(struct cli_train_opts),
    .run = run_train,
};
