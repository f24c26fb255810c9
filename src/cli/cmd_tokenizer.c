/* cmd_tokenizer.c - making a tokenizer. */
#include <string.h>

#include "base/str.h"
#include "cli/cli.h"

struct tokenizer_opts {
    struct cli_common common;
    const char *out;
    int64_t vocab, min_count;
};

static const struct cli_opt options[] = {
    {"out", 'o', CLI_STRING, offsetof(struct tokenizer_opts, out), "FILE", NULL, 0, 0,
     "the tokenizer.json to write", "output"},
    {"vocab", 0, CLI_INT, offsetof(struct tokenizer_opts, vocab), "N", "8192", 282, 4194303,
     "size of the vocabulary", "vocab-size"},
    {"min-count", 0, CLI_INT, offsetof(struct tokenizer_opts, min_count), "N", "2", 1, 1e15,
     "do not merge pairs that occur less often than this", NULL},
};

static int run(void *opts)
{
    struct tokenizer_opts *o = opts;
    if (!o->out) {
        fprintf(stderr, "nibble tokenizer: -o FILE is missing; see 'nibble help tokenizer'\n");
        return CLI_EXIT_USAGE;
    }
    if (!nbi_has_extension(o->out, ".json")) {
        fprintf(stderr, "nibble tokenizer: '%s' must end in .json, as in tokenizer.json\n", o->out);
        return CLI_EXIT_USAGE;
    }
    struct cli_progress progress;
    cli_progress_begin(&progress, o->common.quiet ? NULL : stderr, "merging", CLI_UNIT_ITEMS);
    const struct nb_tokenizer_train_opts to = {.files = (const char *const *)o->common.rest,
                                               .out = o->out,
                                               .vocab = o->vocab,
                                               .min_count = o->min_count,
                                               .progress = cli_progress_update,
                                               .progress_ctx = &progress};
    enum nb_status rc = nb_tokenizer_train(&to);
    cli_progress_end(&progress);
    if (rc != NB_OK)
        return cli_status(rc);
    cli_in_place(o->out);
    struct nb_tokenizer *t = NULL;
    rc = nb_tokenizer_open(&t, o->out, NULL); /* what was written must load */
    if (rc == NB_OK && o->common.json) {
        int code = cli_print_json(json_pack("{s:o,s:I}", "out", cli_json_path(o->out), "entries",
                                            (json_int_t)nb_tokenizer_size(t)),
                                  true);
        nb_tokenizer_close(t);
        return code;
    }
    if (rc == NB_OK && !o->common.quiet)
        printf("wrote %s: %lld entries\n", o->out, (long long)nb_tokenizer_size(t));
    nb_tokenizer_close(t);
    return cli_status(nbi_in_place(rc, o->out));
}

const struct cli_command cli_tokenizer = {
    .name = "tokenizer",
    .group = "train",
    .positional = "train FILES...",
    .what = "train",
    .summary = "train a tokenizer on texts",
    .text = "Trains a byte-level BPE tokenizer with N entries on FILES: the 256 bytes, the merges\n"
            "and Qwen's 26 chat tokens, in this order. FILES are .txt (documents separated by\n"
            "<|endoftext|>), .tsv or .jsonl, read as for training; only their texts are used. The\n"
            "result is a tokenizer.json that Hugging Face can read, and next to it a\n"
            "tokenizer_config.json with a plain ChatML template, unless that file exists already.\n"
            "\n"
            "The result does not depend on the order of FILES.",
    .examples = "  nibble tokenizer train --vocab 8192 -o tokenizer.json stories.txt chats.jsonl\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct tokenizer_opts),
    .run = run,
};
