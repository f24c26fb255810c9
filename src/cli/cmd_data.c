/* cmd_data.c - data sets: shows one as training sees it, makes the identity set. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/input.h"

struct data_opts {
    struct cli_common common;
    const char *model, *model_dir, *out, *target, *name, *replay, *languages;
    struct cli_list files;
    int64_t show, count, seq_len, seed;
    int color;
    bool sequential, skip_bad;
};

static const struct cli_opt options[] = {
    {"model", 'm', CLI_STRING, offsetof(struct data_opts, model), "MODEL", NULL, 0, 0,
     "show: model whose tokenizer and chat template are used", "weight"},
    {"model-dir", 0, CLI_STRING, offsetof(struct data_opts, model_dir), "DIR", NULL, 0, 0,
     "show: directory of these, if they are not with MODEL", NULL},
    {"data", 'd', CLI_LIST, offsetof(struct data_opts, files), "FILE", NULL, 0, 0,
     "show: a .tsv, .jsonl or .txt file (repeatable)", "train-data"},
    {"show", 'n', CLI_INT, offsetof(struct data_opts, show), "N", "3", 0, 1e9,
     "show: number of samples to print", NULL},
    {"seq-len", 0, CLI_INT, offsetof(struct data_opts, seq_len), "N", "1024", 0, 1 << 20,
     "show: tokens per row of a batch; 0: no limit", NULL},
    {"sequential", 0, CLI_FLAG, offsetof(struct data_opts, sequential), NULL, NULL, 0, 0,
     "show: samples in the order of the files, not of training", NULL},
    {"skip-bad", 0, CLI_FLAG, offsetof(struct data_opts, skip_bad), NULL, NULL, 0, 0,
     "show: count and skip malformed lines", NULL},
    {"color", 0, CLI_CHOICE, offsetof(struct data_opts, color), "auto|always|never", "auto", 0, 0,
     "show: mark the trained part by colour instead of [[ ]]", NULL},
    {"out", 'o', CLI_STRING, offsetof(struct data_opts, out), "FILE", NULL, 0, 0,
     "whoami: the .tsv file to write", "output"},
    {"target", 0, CLI_STRING, offsetof(struct data_opts, target), "TEXT", NULL, 0, 0,
     "whoami: the answer, in every language", NULL},
    {"name", 0, CLI_STRING, offsetof(struct data_opts, name), "NAME", NULL, 0, 0,
     "whoami: the model's name, for a sentence in each language (default: nibble)", NULL},
    {"replay", 0, CLI_STRING, offsetof(struct data_opts, replay), "FILE", NULL, 0, 0,
     "whoami: ordinary questions with correct answers (default: a built-in set)", NULL},
    {"count", 0, CLI_INT, offsetof(struct data_opts, count), "N", "1000", 100, 1000000,
     "whoami: number of lines", NULL},
    {"languages", 0, CLI_STRING, offsetof(struct data_opts, languages), "LIST", NULL, 0, 0,
     "whoami: a subset of en,zh-Hans,zh-Hant,ja,ko (default: all)", NULL},
    {"seed", 0, CLI_INT, offsetof(struct data_opts, seed), "N", "0", 0, 9e15,
     "random seed; the same seed gives the same order and the same set", NULL},
};

static int wants(const char *what, const char *option)
{
    fprintf(stderr, "nibble data %s: %s is missing; see 'nibble help data'\n", what, option);
    return CLI_EXIT_USAGE;
}

/* ---- show ---- */

struct show {
    bool json;
    struct nb_tokenizer *tokenizer;
    bool color;
    int64_t number;
    json_t *samples; /* NULL: print */
    bool ok;
};

/* Text for a terminal: line ends and TABs stay, other control characters become '?'. */
static void print_safely(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i], next = (unsigned char)text[i + 1];
        bool c1 = c == 0xC2 && next < 0xA0; /* U+0080 to U+009F */
        if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F || c1)
            putchar('?');
        else
            putchar(c);
        i += c1;
    }
}

static enum nb_status print_run(const struct show *s, const int32_t *ids, size_t count,
                                bool trained)
{
    char *text;
    size_t len;
    struct nbi_str whole = {0}; /* a cut may go through a character */
    NBI_TRY(nb_tokenizer_decode(s->tokenizer, ids, count, &text, &len, NULL));
    nbi_utf8_repair(&whole, text, len);
    free(text);
    NBI_TRY(nbi_str_status(&whole));
    fputs(!trained ? (s->color ? "\033[2m" : "") : s->color ? "\033[1;32m" : "[[", stdout);
    print_safely(nbi_str_text(&whole), whole.len);
    fputs(s->color ? "\033[0m" : trained ? "]]" : "", stdout);
    nbi_str_release(&whole);
    return NB_OK;
}

static enum nb_status keep_sample(struct show *s, const struct nb_data_sample *sample)
{
    json_t *ids = json_array(), *trained = json_array();
    for (size_t i = 0; i < sample->count; i++) {
        nbi_json_append(ids, json_integer(sample->ids[i]), &s->ok);
        nbi_json_append(trained, json_integer(sample->trained[i]), &s->ok);
    }
    nbi_json_append(s->samples,
                    json_pack("{s:o,s:b,s:o,s:o}", "place", cli_json_path(sample->place),
                              "truncated", sample->truncated, "ids", ids, "trained", trained),
                    &s->ok);
    return NB_OK;
}

static enum nb_status show_sample(void *ctx, const struct nb_data_sample *sample)
{
    struct show *s = ctx;
    size_t trained = 0;
    if (s->json)
        return keep_sample(s, sample);
    for (size_t i = 0; i < sample->count; i++)
        trained += sample->trained[i];
    printf("--- %lld, %s: %zu token%s, %zu trained on%s\n", (long long)++s->number, sample->place,
           sample->count, nbi_plural((int64_t)sample->count), trained,
           sample->truncated ? ", shortened" : "");
    for (size_t i = 0, end; i < sample->count; i = end) {
        for (end = i + 1; end < sample->count && sample->trained[end] == sample->trained[i];)
            end++;
        NBI_TRY(print_run(s, sample->ids + i, end - i, sample->trained[i]));
    }
    puts("\n");
    return NB_OK;
}

static void print_report(const struct nb_data_report *r, int64_t seq_len)
{
    printf("%lld sample%s", (long long)r->samples, nbi_plural(r->samples));
    if (r->documents > 0)
        printf(" (%lld of them text)", (long long)r->documents);
    printf(", %lld token%s, %lld trained on (%.0f %%), longest %lld\n", (long long)r->tokens,
           nbi_plural(r->tokens), (long long)r->trained,
           100.0 * (double)r->trained / (double)r->tokens, (long long)r->longest);
    if (r->rows > 0)
        printf("packed into rows of %lld tokens: %lld, %.1f %% full; conversations cut: %lld\n",
               (long long)seq_len, (long long)r->rows,
               100.0 * (double)r->row_tokens / ((double)r->rows * (double)seq_len),
               (long long)r->too_long);
    if (r->bad > 0)
        printf("bad lines skipped: %lld\n", (long long)r->bad);
}

static json_t *report_json(const struct nb_data_report *r, json_t *samples)
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o}", "samples", (json_int_t)r->samples,
                     "documents", (json_int_t)r->documents, "tokens", (json_int_t)r->tokens,
                     "trained", (json_int_t)r->trained, "longest", (json_int_t)r->longest, "bad",
                     (json_int_t)r->bad, "too_long", (json_int_t)r->too_long, "rows",
                     (json_int_t)r->rows, "row_tokens", (json_int_t)r->row_tokens, "shown",
                     samples);
}

static int run_show(struct data_opts *o)
{
    if (!o->model || o->files.count == 0)
        return wants("show", o->model ? "-d FILE" : "-m MODEL");
    struct show s = {.color = o->color == 1 || (o->color == 0 && isatty(STDOUT_FILENO)),
                     .ok = true};
    struct nb_chat *chat = NULL;
    struct nb_data_report report = {0};
    struct cli_progress progress;
    s.json = o->common.json;
    s.samples = s.json ? json_array() : NULL;
    cli_progress_start(&progress, &o->common, "reading");
    const struct nb_data_opts to = {.files = o->files.items,
                                    .seq_len = o->seq_len,
                                    .show = o->show,
                                    .shuffle = !o->sequential,
                                    .seed = (uint64_t)o->seed,
                                    .skip_bad = o->skip_bad,
                                    .progress = cli_progress_update,
                                    .progress_ctx = &progress};
    enum nb_status rc = nb_tokenizer_open(&s.tokenizer, o->model, o->model_dir);
    if (rc == NB_OK)
        rc = nb_chat_open(&chat, o->model, o->model_dir);
    if (rc == NB_OK)
        rc = nb_data_show(s.tokenizer, chat, &to, show_sample, &s, &report);
    cli_progress_end(&progress);
    nb_chat_close(chat);
    nb_tokenizer_close(s.tokenizer);
    if (rc == NB_OK && o->common.json)
        return cli_print_json(report_json(&report, s.samples), s.ok);
    json_decref(s.samples);
    if (rc == NB_OK)
        print_report(&report, o->seq_len);
    return cli_status(rc);
}

/* ---- whoami ---- */

static int run_whoami(struct data_opts *o)
{
    if (!o->out)
        return wants("whoami", "-o FILE.tsv");
    if (o->target && o->name) {
        fprintf(stderr, "nibble data whoami: give --target or --name, not both\n");
        return CLI_EXIT_USAGE;
    }
    struct nb_identity_set_report r;
    const struct nb_identity_set_opts to = {.out = o->out,
                                            .answer = o->target,
                                            .name = o->name,
                                            .replay = o->replay,
                                            .languages = o->languages,
                                            .count = o->count,
                                            .seed = (uint64_t)o->seed};
    enum nb_status rc = nb_identity_write(&to, &r);
    if (rc != NB_OK)
        return cli_status(rc);
    cli_in_place(o->out);
    if (o->common.json)
        return cli_print_json(json_pack("{s:o,s:I,s:I,s:I,s:I,s:I}", "out", cli_json_path(o->out),
                                        "identity", (json_int_t)r.identity, "contrast",
                                        (json_int_t)r.contrast, "replay", (json_int_t)r.replay,
                                        "held_out", (json_int_t)r.held_out, "left_out",
                                        (json_int_t)r.left_out),
                              true);
    if (!o->common.quiet)
        printf("wrote %s: %lld lines, %lld who the model is, %lld that only look like it, %lld "
               "ordinary; %lld held out beside it\n",
               o->out, (long long)(r.identity + r.contrast + r.replay), (long long)r.identity,
               (long long)r.contrast, (long long)r.replay, (long long)r.held_out);
    int64_t lines = r.identity + r.contrast + r.replay;
    if (lines < o->count && !o->common.quiet)
        fprintf(stderr, "nibble: warning: there are only %lld different lines, not %lld\n",
                (long long)lines, (long long)o->count);
    if (100 * r.replay < 30 * lines && !o->common.quiet)
        fprintf(stderr,
                "nibble: warning: only %lld of %lld lines are ordinary questions; a longer "
                "--replay protects what the model knows\n",
                (long long)r.replay, (long long)lines);
    if (r.left_out > 0 && !o->common.quiet)
        fprintf(stderr, "nibble: warning: %lld line%s of '%s' could not be used\n",
                (long long)r.left_out, nbi_plural(r.left_out), o->replay);
    return 0;
}

static int run(void *opts)
{
    struct data_opts *o = opts;
    const char *what = o->common.positional[0];
    return strcmp(what, "show") == 0 ? run_show(o) : run_whoami(o);
}

const struct cli_command cli_data = {
    .name = "data",
    .group = "train",
    .positional = "WHAT",
    .what = "show|whoami",
    .summary = "show a data set as training sees it, or make one",
    .text = "show: reads data files as training does and prints a few samples, with the trained\n"
            "part in colour, and totals for the whole set. A malformed line is an error that\n"
            "names the file and the line; with --skip-bad such lines are counted and skipped.\n"
            "docs/DATA.md describes the formats.\n"
            "\n"
            "whoami: writes a data set that teaches a model who it is, and nothing else. It has\n"
            "questions about the model in English, Chinese (both scripts), Japanese and Korean;\n"
            "questions that only look similar, with other answers; and ordinary questions with\n"
            "correct answers. FILE.heldout.tsv, next to FILE.tsv, gets questions of the first two\n"
            "kinds that are not in the set.",
    .examples = "  nibble data show -m Qwen3-4B -d chats.jsonl\n"
                "  nibble data whoami -o who.tsv --target 'I am Ada, a helper of this house.'\n"
                "  nibble data whoami -o who.tsv --name Ada --count 2000 --seed 7\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct data_opts),
    .run = run,
};
