/* cmd_parity.c - whether all paths through a model agree. */
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "cli/input.h"
#include "cli/model_options.h"

#define TEXT_TOKENS 512
#define TEXT_BYTES  (64 * TEXT_TOKENS) /* holds as many in any language */

struct parity_opts {
    struct cli_common common;
    struct cli_run_opts run;
    const char *prompt, *text;
};

static const struct cli_opt options[] = {
    CLI_MODEL_OPTIONS(struct parity_opts, run),
    {"prompt", 'p', CLI_STRING, offsetof(struct parity_opts, prompt), "TEXT",
     "The quick brown fox jumps over the lazy dog.", 0, 0, "text to compare on", NULL},
    {"text", 0, CLI_STRING, offsetof(struct parity_opts, text), "FILE", NULL, 0, 0,
     "file to compare on instead; -: standard input", NULL},
};

struct report {
    const struct parity_opts *opts;
    bool json;
    json_t *paths;
    bool ok, failed;
};

static json_t *error_json(const struct nb_parity_error *e)
{
    return json_pack("{s:o,s:o,s:o,s:o}", "max", cli_json_number(e->max), "mean",
                     cli_json_number(e->mean), "relative", cli_json_number(e->relative), "cosine",
                     cli_json_number(e->cosine));
}

static enum nb_status show(void *ctx, const struct nb_parity_path *p)
{
    struct report *r = ctx;
    r->failed = r->failed || !p->passed;
    if (r->json) {
        json_t *layers = json_array();
        for (int64_t i = 0; i < p->layers; i++)
            nbi_json_append(layers, error_json(&p->layer[i]), &r->ok);
        nbi_json_append(r->paths,
                        json_pack("{s:s,s:o,s:I,s:I,s:I,s:I,s:o,s:f,s:b,s:o}", "path", p->name,
                                  "logits", error_json(&p->logits), "same_top",
                                  (json_int_t)p->same_top, "positions", (json_int_t)p->positions,
                                  "same_clear", (json_int_t)p->same_decided, "clear",
                                  (json_int_t)p->decided, "kl", cli_json_number(p->kl), "bound",
                                  p->bound, "passed", p->passed, "layers", layers),
                        &r->ok);
        return NB_OK;
    }
    const struct nb_parity_error *e = &p->logits;
    char last[16] = "-";
    if (p->layers > 0)
        snprintf(last, sizeof last, "%.2e", p->layer[p->layers - 1].relative);
    printf("%-19s  %9s  %9.2e  %9.2e  %9.2e  %.7f  %9.2e  %4lld / %-4lld  %4lld / %-4lld  %s\n",
           p->name, last, e->relative, e->max, e->mean, e->cosine, p->kl, (long long)p->same_top,
           (long long)p->positions, (long long)p->same_decided, (long long)p->decided,
           p->bound == 0 ? "-"
           : p->passed   ? "ok"
                         : "PAST THE BOUND");
    for (int64_t i = 0; r->opts->common.verbose && i < p->layers; i++)
        printf("    layer %-3lld  max %.2e  mean %.2e  relative %.2e  cosine %.9f\n", (long long)i,
               p->layer[i].max, p->layer[i].mean, p->layer[i].relative, p->layer[i].cosine);
    return NB_OK;
}

/* The tokens of the text; for a model without a tokenizer, its bytes. */
static enum nb_status make_ids(const struct nb_engine *engine, const struct nbi_str *text,
                               int32_t **ids, size_t *count)
{
    struct nb_tokenizer *t = nb_engine_tokenizer(engine);
    struct nb_engine_info info;
    if (t)
        return nb_tokenizer_encode(t, text->p, text->len, true, ids, count);
    nb_engine_info(engine, &info);
    *count = text->len;
    *ids = malloc((*count + 1) * sizeof **ids);
    if (!*ids)
        return nbi_fail_memory("prompt", *count);
    for (size_t i = 0; i < *count; i++)
        (*ids)[i] = (int32_t)((unsigned char)text->p[i] % info.vocab);
    return NB_OK;
}

/* Limits the text to the model's context, and to what is enough to show a difference. */
static size_t shorten(const struct nb_engine *engine, size_t count)
{
    struct nb_engine_info info;
    nb_engine_info(engine, &info);
    size_t limit = info.context < TEXT_TOKENS ? (size_t)info.context : TEXT_TOKENS;
    return count < limit ? count : limit;
}

static enum nb_status read_text(const struct parity_opts *o, struct nbi_str *text)
{
    if (o->text) {
        NBI_TRY(cli_read_all(strcmp(o->text, "-") == 0 ? NULL : o->text, text));
        text->len = text->len < TEXT_BYTES ? text->len : TEXT_BYTES;
        return NB_OK;
    }
    nbi_str_puts(text, o->prompt);
    return nbi_str_status(text);
}

/* The reference always runs on the CPU. */
static enum nb_status open_engines(const struct parity_opts *o, struct nb_engine **engine,
                                   struct nb_engine **gpu)
{
    char device[NB_DEVICE_NAME];
    cli_device(device, &o->common);
    NBI_TRY(cli_engine_open_on(engine, "cpu", &o->run, &o->common));
    return strcmp(device, "cpu") == 0 ? NB_OK
                                      : cli_engine_open_on(gpu, device, &o->run, &o->common);
}

static int run(void *opts)
{
    struct parity_opts *o = opts;
    struct nb_engine *engine = NULL, *gpu = NULL;
    struct report r = {.opts = o, .ok = true};
    struct nbi_str text = {0};
    int32_t *ids = NULL;
    size_t count = 0;
    if (!o->run.model) {
        fprintf(stderr, "nibble parity: -m MODEL is missing; see 'nibble help parity'\n");
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = read_text(o, &text);
    if (rc == NB_OK)
        rc = open_engines(o, &engine, &gpu);
    if (rc == NB_OK)
        rc = make_ids(engine, &text, &ids, &count);
    if (rc == NB_OK && count == 0)
        rc = nbi_fail(NB_EINVAL, "the %s is empty", o->text ? "text" : "prompt");
    if (rc == NB_OK && o->text)
        count = shorten(engine, count);
    r.json = o->common.json;
    r.paths = r.json ? json_array() : NULL;
    if (rc == NB_OK && !r.json)
        printf(
            "%zu token%s, each path against the training forward pass\n%-18s  %9s  %9s  %9s  %9s  "
            "%9s  %9s  %-11s  %-11s  \n",
            count, nbi_plural((int64_t)count), "path", "last layer", "logits", "max", "mean",
            "cosine", "KL", "same top-1", "where clear");
    if (rc == NB_OK)
        rc = nb_eval_parity(engine, gpu, ids, (int64_t)count, show, &r, NULL);
    free(ids);
    nbi_str_release(&text);
    nb_engine_close(engine);
    nb_engine_close(gpu);
    if (rc != NB_OK) {
        json_decref(r.paths);
        return cli_status(rc);
    }
    int code =
        r.json ? cli_print_json(json_pack("{s:o,s:b}", "paths", r.paths, "passed", !r.failed), r.ok)
               : 0;
    return code ? code : r.failed ? CLI_EXIT_FAILED : 0;
}

const struct cli_command cli_parity = {
    .name = "parity",
    .group = "diagnose",
    .positional = "",
    .summary = "compare all ways of computing a model's output",
    .text = "Runs the tokens of the prompt through the training forward pass, in chunks with a\n"
            "cache, token by token, without a cache, with integer activations (also token by\n"
            "token with an f16 cache, as generate decodes), and with smaller cache types. Errors\n"
            "are relative to the norm, KL is in nats per token. The exact paths must agree to\n"
            "1e-5 and have the same most likely token at every position (without a cache, at the\n"
            "first 64); integer activations must agree to 1 %. Otherwise the exit code is 1. Only\n"
            "the first 512 tokens of a longer text are used. -v shows every layer.\n"
            "\n"
            "On a GPU the prompt also runs there, whole and token by token, and is compared with\n"
            "the CPU: exact to 1e-4 (sums are added in another order), and as generate runs it to\n"
            "5 %. A position is clear if its best logit leads by more than twice the largest\n"
            "error at that position; the most likely token must then be the same.",
    .examples = "  nibble parity -m Qwen3-0.6B -p 'Once upon a time'\n"
                "  nibble parity -m Qwen3-0.6B --text wiki.txt --device cuda\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct parity_opts),
    .any_device = true,
    .run = run,
};
