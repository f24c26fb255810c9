/* cmd_tokenize.c - text to token ids, and back. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "cli/cli.h"
#include "cli/input.h"

struct tokenize_opts {
    struct cli_common common;
    const char *model, *model_dir, *text, *file, *ids;
    bool no_special, jsonl;
};

#define MODEL_OPTIONS                                                                              \
    {"model",                                                                                      \
     'm',                                                                                          \
     CLI_STRING,                                                                                   \
     offsetof(struct tokenize_opts, model),                                                        \
     "PATH",                                                                                       \
     NULL,                                                                                         \
     0,                                                                                            \
     0,                                                                                            \
     "the same as MODEL",                                                                          \
     "weight"},                                                                                    \
    {                                                                                              \
        "model-dir", 0, CLI_STRING, offsetof(struct tokenize_opts, model_dir), "DIR", NULL, 0, 0,  \
            "directory of tokenizer.json, if it is not with MODEL", NULL                           \
    }

static int two_sources(const char *command, const char *a, const char *b)
{
    fprintf(stderr, "nibble %s: give %s or %s, not both\n", command, a, b);
    return CLI_EXIT_USAGE;
}

/* ---- tokenize ---- */

struct job {
    struct nb_tokenizer *tokenizer;
    bool special;
    struct nbi_str line;
};

/* Appends "1,2,3" or "1, 2, 3". */
static void put_ids(struct nbi_str *s, const int32_t *ids, size_t count, const char *between)
{
    for (size_t i = 0; i < count; i++) {
        char digits[12], *p = digits + sizeof digits;
        uint32_t v = (uint32_t)ids[i];
        do
            *--p = (char)('0' + v % 10);
        while ((v /= 10) > 0);
        if (i > 0)
            nbi_str_puts(s, between);
        nbi_str_append(s, p, (size_t)(digits + sizeof digits - p));
    }
}

static enum nb_status print_ids(struct job *job, const char *text, size_t len, bool json)
{
    int32_t *ids;
    size_t count;
    NBI_TRY(nb_tokenizer_encode(job->tokenizer, text, len, job->special, &ids, &count));
    job->line.len = 0;
    nbi_str_puts(&job->line, json ? "{\"ids\": [" : "");
    put_ids(&job->line, ids, count, json ? ", " : ",");
    nbi_str_puts(&job->line, json ? "]}\n" : "\n");
    free(ids);
    NBI_TRY(nbi_str_status(&job->line));
    fwrite(job->line.p, 1, job->line.len, stdout);
    return NB_OK;
}

static enum nb_status tokenize_line(void *ctx, const char *line, size_t len)
{
    struct nbi_jspan json, value;
    struct nbi_str text = {0};
    NBI_TRY(nbi_jscan(&json, line, len));
    value = nbi_jget(json, "text");
    if (nbi_jtype(value) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'text' must be a string, it is %s", nbi_jtype_text(value));
    nbi_jstring(value, &text);
    enum nb_status rc = nbi_str_status(&text);
    if (rc == NB_OK)
        rc = print_ids(ctx, nbi_str_text(&text), text.len, true);
    nbi_str_release(&text);
    return rc;
}

static enum nb_status tokenize_one(struct job *job, const struct tokenize_opts *o)
{
    struct nbi_str text = {0};
    enum nb_status rc = NB_OK;
    if (o->text)
        nbi_str_puts(&text, o->text);
    else
        rc = cli_read_all(o->file, &text);
    if (rc == NB_OK)
        rc = nbi_str_status(&text);
    if (rc == NB_OK)
        rc = print_ids(job, nbi_str_text(&text), text.len, o->common.json);
    nbi_str_release(&text);
    return rc;
}

static int run_tokenize(void *opts)
{
    struct tokenize_opts *o = opts;
    if (o->text && (o->file || o->jsonl))
        return two_sources("tokenize", "--text", o->file ? "--file" : "--jsonl");
    struct job job = {.special = !o->no_special};
    enum nb_status rc = nb_tokenizer_open(&job.tokenizer, o->common.positional[0], o->model_dir);
    if (rc == NB_OK)
        rc = o->jsonl ? cli_read_lines(o->file, tokenize_line, &job) : tokenize_one(&job, o);
    nb_tokenizer_close(job.tokenizer);
    nbi_str_release(&job.line);
    return cli_status(rc);
}

static const struct cli_opt tokenize_options[] = {
    MODEL_OPTIONS,
    {"text", 0, CLI_STRING, offsetof(struct tokenize_opts, text), "TEXT", NULL, 0, 0,
     "the text to tokenize", NULL},
    {"file", 0, CLI_STRING, offsetof(struct tokenize_opts, file), "FILE", NULL, 0, 0,
     "read FILE instead of standard input", NULL},
    {"no-special", 0, CLI_FLAG, offsetof(struct tokenize_opts, no_special), NULL, NULL, 0, 0,
     "treat special tokens in the text as ordinary text", NULL},
    {"jsonl", 0, CLI_FLAG, offsetof(struct tokenize_opts, jsonl), NULL, NULL, 0, 0,
     "read lines {\"text\": ...}, write lines {\"ids\": [...]}", NULL},
};

const struct cli_command cli_tokenize = {
    .name = "tokenize",
    .group = "convert",
    .positional = "MODEL",
    .summary = "convert text to token ids",
    .text = "Prints the ids of a text on one line, separated by commas. MODEL is a model\n"
            "directory, a tokenizer.json or a .gguf file; only the tokenizer is read. The text\n"
            "comes from --text, --file or standard input and is used to the last byte, a final\n"
            "newline included. Malformed UTF-8 is read as U+FFFD.\n"
            "\n"
            "No tokens are added. Special tokens in the text, such as <|im_start|>, are\n"
            "recognised unless --no-special is given. Added tokens that are not special, such as\n"
            "<think>, are always recognised. With --jsonl the command stops at the first line\n"
            "that fails.",
    .examples = "  nibble tokenize -m Qwen3-4B --text 'Hello, world!'\n"
                "  nibble tokenize -m Qwen3-4B --jsonl < texts.jsonl > ids.jsonl\n",
    .options = tokenize_options,
    .option_count = sizeof tokenize_options / sizeof *tokenize_options,
    .opts_size = sizeof(struct tokenize_opts),
    .model_at = offsetof(struct tokenize_opts, model),
    .run = run_tokenize,
};

/* ---- detokenize ---- */

struct ids {
    int32_t *p;
    size_t count, cap;
};

static enum nb_status add_id(struct ids *ids, int64_t id)
{
    NBI_TRY(NBI_ARRAY_RESERVE(ids->p, ids->cap, ids->count + 1, "token ids"));
    ids->p[ids->count++] = (int32_t)id;
    return NB_OK;
}

/* Whole numbers, separated by commas or white space, perhaps in brackets. */
static enum nb_status parse_ids(struct ids *ids, const char *text)
{
    const char *p = text;
    while (*(p += strspn(p, " \t\r\n,[]"))) {
        char *end = NULL;
        long id = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
        if (id < 0 || id > INT32_MAX || !strchr(" \t\r\n,]", *end)) {
            char word[32];
            snprintf(word, sizeof word, "%.*s", (int)strcspn(p, " \t\r\n,]"), p);
            return nbi_fail(NB_EVALUE, "'%s' is not a token id", word);
        }
        NBI_TRY(add_id(ids, id));
        p = end;
    }
    return NB_OK;
}

struct back {
    struct nb_tokenizer *tokenizer;
    size_t unknown;
    bool json;
};

static enum nb_status print_text(struct back *job, const struct ids *ids)
{
    char *text;
    size_t len, unknown;
    NBI_TRY(nb_tokenizer_decode(job->tokenizer, ids->p, ids->count, &text, &len, &unknown));
    job->unknown += unknown;
    enum nb_status rc = NB_OK;
    if (job->json)
        rc = cli_print_text_line(text, len);
    else
        fwrite(text, 1, len, stdout);
    free(text);
    return rc;
}

static enum nb_status detokenize_line(void *ctx, const char *line, size_t len)
{
    struct nbi_jspan json, value, key, item;
    struct nbi_jiter it;
    struct ids ids = {0};
    NBI_TRY(nbi_jscan(&json, line, len));
    value = nbi_jget(json, "ids");
    if (nbi_jtype(value) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "'ids' must be an array, it is %s", nbi_jtype_text(value));
    nbi_jiter_init(&it, value);
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && nbi_jiter_next(&it, &key, &item)) {
        int64_t id;
        rc = nbi_jint(item, 0, INT32_MAX, &id)
                 ? add_id(&ids, id)
                 : nbi_fail(NB_EVALUE, "element %zu of 'ids' is not a token id", ids.count);
    }
    if (rc == NB_OK)
        rc = print_text(ctx, &ids);
    free(ids.p);
    return rc;
}

static enum nb_status detokenize_one(struct back *job, const char *given)
{
    struct nbi_str text = {0};
    struct ids ids = {0};
    enum nb_status rc = given ? NB_OK : cli_read_all(NULL, &text);
    if (rc == NB_OK && strlen(nbi_str_text(&text)) != text.len)
        rc = nbi_fail(NB_EVALUE, "a NUL character among the token ids");
    if (rc == NB_OK)
        rc = parse_ids(&ids, given ? given : nbi_str_text(&text));
    if (rc == NB_OK)
        rc = print_text(job, &ids);
    nbi_str_release(&text);
    free(ids.p);
    return rc;
}

static int run_detokenize(void *opts)
{
    struct tokenize_opts *o = opts;
    if (o->ids && o->jsonl)
        return two_sources("detokenize", "--ids", "--jsonl");
    struct back job = {.json = o->jsonl || o->common.json};
    enum nb_status rc = nb_tokenizer_open(&job.tokenizer, o->common.positional[0], o->model_dir);
    if (rc == NB_OK)
        rc = o->jsonl ? cli_read_lines(NULL, detokenize_line, &job) : detokenize_one(&job, o->ids);
    if (rc == NB_OK && job.unknown > 0 && !o->common.quiet)
        fprintf(stderr, "nibble: warning: ids outside the vocabulary were skipped: %zu\n",
                job.unknown);
    nb_tokenizer_close(job.tokenizer);
    return cli_status(rc);
}

static const struct cli_opt detokenize_options[] = {
    MODEL_OPTIONS,
    {"ids", 0, CLI_STRING, offsetof(struct tokenize_opts, ids), "IDS", NULL, 0, 0,
     "the ids, separated by commas or spaces (default: standard input)", NULL},
    {"jsonl", 0, CLI_FLAG, offsetof(struct tokenize_opts, jsonl), NULL, NULL, 0, 0,
     "read lines {\"ids\": [...]}, write lines {\"text\": ...}", NULL},
};

const struct cli_command cli_detokenize = {
    .name = "detokenize",
    .group = "convert",
    .positional = "MODEL",
    .summary = "convert token ids to text",
    .text = "Prints the text of the given token ids, byte for byte and without adding a newline.\n"
            "Incomplete characters are printed as the bytes that they consist of, and as U+FFFD\n"
            "in JSON. Ids outside the vocabulary are skipped, and a warning gives their number.",
    .examples = "  nibble detokenize -m Qwen3-4B --ids 9707,11,1879,0\n"
                "  nibble tokenize -m Qwen3-4B --text hi | nibble detokenize -m Qwen3-4B\n",
    .options = detokenize_options,
    .option_count = sizeof detokenize_options / sizeof *detokenize_options,
    .opts_size = sizeof(struct tokenize_opts),
    .model_at = offsetof(struct tokenize_opts, model),
    .run = run_detokenize,
};
