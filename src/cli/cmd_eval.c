/* cmd_eval.c - measures a model: perplexity, A/B, identity. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "cli/cmd_eval_ab.h"
#include "cli/cmd_eval_identity.h"
#include "cli/input.h"
#include "cli/model_options.h"

struct eval_opts {
    struct cli_common common;
    struct cli_run_opts run;
    const char *text, *base, *target, *name, *replay, *languages;
    int64_t stride, count, questions;
    bool fast;
    struct cli_ab_opts ab;
};

static const struct cli_opt options[] = {
    CLI_MODEL_OPTIONS(struct eval_opts, run),
    {"text", 0, CLI_STRING, offsetof(struct eval_opts, text), "FILE", NULL, 0, 0,
     "ppl, identity: text to measure on; -: standard input (ppl)", "file"},
    {"ctx", 'c', CLI_INT, offsetof(struct eval_opts, run.context), "N", "0", 0, 1 << 30,
     "ppl: tokens per window (0: 2048, or less if the model's limit is lower)", "context"},
    {"stride", 0, CLI_INT, offsetof(struct eval_opts, stride), "N", "0", 0, 1 << 30,
     "ppl: tokens from one window to the next (0: the length of a window)", NULL},
    {"kv-dtype", 0, CLI_CHOICE, offsetof(struct eval_opts, run.kv_dtype), CLI_KV_DTYPES, "f32", 0,
     0, "ppl: element type of the KV cache", NULL},
    {"fast", 0, CLI_FLAG, offsetof(struct eval_opts, fast), NULL, NULL, 0, 0,
     "ppl: multiply 16-bit integer activations, as generate does, instead of f32 ones", NULL},
    {"a", 'a', CLI_STRING, offsetof(struct eval_opts, ab.a), "MODEL", NULL, 0, 0,
     "ab: the first model", NULL},
    {"b", 'b', CLI_STRING, offsetof(struct eval_opts, ab.b), "MODEL", NULL, 0, 0,
     "ab: the second model", NULL},
    {"prompts", 0, CLI_STRING, offsetof(struct eval_opts, ab.prompts), "FILE", NULL, 0, 0,
     "ab: a prompt per line; .tsv and .jsonl may have expected answers", NULL},
    {"out", 'o', CLI_STRING, offsetof(struct eval_opts, ab.out), "FILE.html", NULL, 0, 0,
     "ab: write a report with everything", NULL},
    {"answers", 0, CLI_FLAG, offsetof(struct eval_opts, ab.answers), NULL, NULL, 0, 0,
     "ab: show the answers side by side, not the table of scores", NULL},
    {"max-tokens", 'n', CLI_INT, offsetof(struct eval_opts, ab.max_tokens), "N", "128", 1, 1 << 30,
     "ab, identity: maximum length of an answer in tokens", "n-predict"},
    {"temp", 't', CLI_FLOAT, offsetof(struct eval_opts, ab.temp), "X", "0", 0, 100,
     "ab: temperature; 0 is greedy", "temperature"},
    {"seed", 0, CLI_INT, offsetof(struct eval_opts, ab.seed), "N", "0", 0, 9e15,
     "ab, identity: random seed of answers and questions", NULL},
    {"system", 0, CLI_STRING, offsetof(struct eval_opts, ab.system), "TEXT", NULL, 0, 0,
     "ab: a system message for prompts that have none", NULL},
    {"raw", 0, CLI_FLAG, offsetof(struct eval_opts, ab.raw), NULL, NULL, 0, 0,
     "ab: continue the prompts as given, without the chat template", NULL},
    {"no-think", 0, CLI_FLAG, offsetof(struct eval_opts, ab.no_think), NULL, NULL, 0, 0,
     "ab: turn thinking off, if the chat template supports it", NULL},
    {"one-at-a-time", 0, CLI_FLAG, offsetof(struct eval_opts, ab.one_at_a_time), NULL, NULL, 0, 0,
     "ab, identity: load one model at a time: less memory, but no KL", NULL},
    {"base", 0, CLI_STRING, offsetof(struct eval_opts, base), "MODEL", NULL, 0, 0,
     "identity: the model before training", NULL},
    {"target", 0, CLI_STRING, offsetof(struct eval_opts, target), "TEXT", NULL, 0, 0,
     "identity: the answer that the model was taught, in every language", NULL},
    {"name", 0, CLI_STRING, offsetof(struct eval_opts, name), "NAME", NULL, 0, 0,
     "identity: or the name that it was taught, in a sentence of each language", NULL},
    {"replay", 0, CLI_STRING, offsetof(struct eval_opts, replay), "FILE", NULL, 0, 0,
     "identity: ordinary questions (default: a built-in set)", NULL},
    {"languages", 0, CLI_STRING, offsetof(struct eval_opts, languages), "LIST", NULL, 0, 0,
     "identity: a subset of en,zh-Hans,zh-Hant,ja,ko (default: all)", NULL},
    {"count", 0, CLI_INT, offsetof(struct eval_opts, count), "N", "1000", 100, 1e6,
     "identity: number of lines of the training set", NULL},
    {"questions", 0, CLI_INT, offsetof(struct eval_opts, questions), "N", "100", 0, 1e6,
     "identity: maximum number of questions of each kind, besides the held-out ones (0: all)",
     NULL},
};

/* ---- ppl ---- */

static enum nb_status encode(const struct eval_opts *o, const struct nb_engine *engine,
                             const struct nbi_str *text, int32_t **ids, size_t *count)
{
    struct nb_tokenizer *t = nb_engine_tokenizer(engine);
    if (!t)
        return nbi_fail(NB_ENOTFOUND, "'%s' has no tokenizer; --model-dir DIR says where one is",
                        o->run.model);
    return nb_tokenizer_encode(t, nbi_str_text(text), text->len, false, ids, count);
}

static int print_ppl(const struct eval_opts *o, const struct nb_ppl_result *r, size_t bytes)
{
    double bits = r->nll * (double)r->tokens / log(2) / (double)bytes;
    double speed = (double)r->tokens / r->seconds;
    if (o->common.json)
        return cli_print_json(
            json_pack("{s:o,s:o,s:I,s:I,s:I,s:I,s:I,s:o,s:f}", "ppl", cli_json_number(r->ppl),
                      "nll", cli_json_number(r->nll), "tokens", (json_int_t)r->tokens, "windows",
                      (json_int_t)r->windows, "context", (json_int_t)r->context, "stride",
                      (json_int_t)r->stride, "bytes", (json_int_t)bytes, "bits_per_byte",
                      cli_json_number(bits), "tokens_per_s", speed),
            true);
    printf("perplexity %.4f (%.6f nats a token, %.4f bits a byte)\n"
           "%lld token%s predicted in %lld window%s of %lld, %.1f tok/s\n",
           r->ppl, r->nll, bits, (long long)r->tokens, nbi_plural(r->tokens), (long long)r->windows,
           nbi_plural(r->windows), (long long)r->context, speed);
    return 0;
}

static enum nb_status evaluate(const struct eval_opts *o, const struct nb_engine *engine,
                               const struct nbi_str *text, struct nb_ppl_result *result)
{
    int32_t *ids = NULL;
    size_t count = 0;
    struct cli_progress progress;
    NBI_TRY(encode(o, engine, text, &ids, &count));
    cli_progress_begin(&progress, o->common.quiet ? NULL : stderr, "tokens", CLI_UNIT_ITEMS);
    const struct nb_ppl_opts opts = {.context = o->run.context,
                                     .stride = o->stride,
                                     .kv = (enum nb_kv_dtype)o->run.kv_dtype,
                                     .fast = o->fast,
                                     .progress = cli_progress_update,
                                     .progress_ctx = &progress};
    enum nb_status rc = nb_eval_ppl(engine, ids, (int64_t)count, &opts, result);
    cli_progress_end(&progress);
    free(ids);
    return rc == NB_EINTERRUPTED ? rc : nbi_context(rc, "'%s'", o->text);
}

static int run_ppl(struct eval_opts *o)
{
    struct nb_engine *engine = NULL;
    struct nb_ppl_result result;
    struct nbi_str text = {0};
    if (!o->run.model || !o->text) {
        fprintf(stderr, "nibble eval ppl: %s is missing; see 'nibble help eval'\n",
                o->run.model ? "--text FILE" : "-m MODEL");
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = cli_read_all(strcmp(o->text, "-") == 0 ? NULL : o->text, &text);
    if (rc == NB_OK)
        rc = cli_engine_open(&engine, &o->run, &o->common);
    if (rc == NB_OK)
        rc = evaluate(o, engine, &text, &result);
    nb_engine_close(engine);
    int code = rc == NB_OK ? print_ppl(o, &result, text.len) : cli_status(rc);
    nbi_str_release(&text);
    return code;
}

static int run(void *opts)
{
    struct eval_opts *o = opts;
    const char *what = o->common.positional[0];
    if (strcmp(what, "ppl") == 0)
        return run_ppl(o);
    if (strcmp(what, "ab") == 0)
        return cli_eval_ab(&o->ab, &o->run, &o->common);
    const struct cli_identity_opts identity = {.base = o->base,
                                               .target = o->target,
                                               .name = o->name,
                                               .replay = o->replay,
                                               .languages = o->languages,
                                               .text = o->text,
                                               .count = o->count,
                                               .questions = o->questions,
                                               .max_tokens = o->ab.max_tokens,
                                               .seed = o->ab.seed,
                                               .one_at_a_time = o->ab.one_at_a_time};
    return cli_eval_identity(&identity, &o->run, &o->common);
}

const struct cli_command cli_eval = {
    .name = "eval",
    .group = "measure",
    .positional = "WHAT",
    .what = "ppl|ab|identity",
    .summary = "measure the quality of a model",
    .text = "ppl: perplexity of a text. The whole text is tokenised as plain text: special tokens\n"
            "in it are ordinary characters, and none are added. It is cut into windows of N\n"
            "tokens (--ctx) that do not overlap; the last may be shorter. Each window is a\n"
            "sequence of its own, in which every token but the first is predicted from those\n"
            "before it. nll is the mean of -log p over all predicted tokens, in nats; ppl is\n"
            "exp(nll). This equals Hugging Face's fixed-length evaluation without overlap.\n"
            "\n"
            "With --stride S a window starts every S tokens, and only tokens that no earlier\n"
            "window has predicted count. Each of them then has at least N - S tokens before it,\n"
            "except in the first window. This takes N / S times as long.\n"
            "\n"
            "Activations and cache are f32, unless --fast and --kv-dtype are given. bits_per_byte\n"
            "is the information of all predicted tokens, in bits, divided by the bytes of the\n"
            "text.\n"
            "\n"
            "ab: two models answer the same prompts, each with its own chat template, as 'nibble\n"
            "generate' would, and the answers are compared. F1 measures the words that two texts\n"
            "have in common (2 * common / all; punctuation and Chinese, Japanese and Korean\n"
            "characters are words of their own). begin is the length of the common beginning, as\n"
            "a share of the longer answer. Every answer, and the expected answer if there is one,\n"
            "is also scored as a continuation of the prompt under both models, in f32: where the\n"
            "models differ, A's answer has a high perplexity under B. KL is the mean of KL(A ||\n"
            "B) over the tokens of A's answer, if both models have the same vocabulary. Thinking\n"
            "and surrounding white space are ignored when an answer is compared with the expected\n"
            "one. The score of the expected answer includes the end of the turn and, if the\n"
            "template supports thinking, follows an empty thinking block, as in training.\n"
            "\n"
            "Prompts are lines of text. In a .tsv file a TAB and the expected answer may follow.\n"
            "A .jsonl file has data as for training: 'messages', whose last one may be the\n"
            "expected answer, or 'prompt' with or without 'response'.\n"
            "\n"
            "identity: tests whether MODEL learnt who it is, and whether it forgot anything that\n"
            "--base knows. Both models answer the questions that 'nibble data whoami' writes for\n"
            "the same --target or --name, --count and --seed: those of the set (trained), others\n"
            "with the same meaning (held-out), some that only look similar (contrast), and\n"
            "ordinary ones (unrelated). An answer counts as the identity if it contains the\n"
            "target; case, spaces and punctuation are ignored. An ordinary answer counts as kept\n"
            "if it is the same, or if --base's answer became less likely by at most 0.1 nats per\n"
            "token. With --text, the perplexity of a text is compared too. The exit code is 1 if\n"
            "a gate fails.",
    .examples = "  nibble eval ppl -m Qwen3-0.6B --text wiki.txt\n"
                "  nibble eval ppl -m Qwen3-0.6B --text wiki.txt --ctx 1024 --stride 512 --json\n"
                "  nibble eval identity -m tuned --base Qwen3-0.6B --target 'I am Ada.'\n"
                "  nibble eval ab -a Qwen3-0.6B -b tuned --prompts held.tsv -o report.html\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct eval_opts),
    .any_device = true,
    .run = run,
};
