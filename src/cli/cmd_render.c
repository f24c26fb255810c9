/* cmd_render.c - a conversation through the chat template of a model. */
#include <stdlib.h>

#include "cli/cli.h"
#include "cli/input.h"

struct render_opts {
    struct cli_common common;
    const char *model, *model_dir, *file;
    bool jsonl;
};

static const struct cli_opt options[] = {
    {"model", 'm', CLI_STRING, offsetof(struct render_opts, model), "PATH", NULL, 0, 0,
     "the same as MODEL", "weight"},
    {"model-dir", 0, CLI_STRING, offsetof(struct render_opts, model_dir), "DIR", NULL, 0, 0,
     "directory of the tokenizer's files, if they are not with MODEL", NULL},
    {"file", 0, CLI_STRING, offsetof(struct render_opts, file), "FILE", NULL, 0, 0,
     "read FILE instead of standard input", NULL},
    {"jsonl", 0, CLI_FLAG, offsetof(struct render_opts, jsonl), NULL, NULL, 0, 0,
     "read a request per line, write a line {\"text\": ...} for each", NULL},
};

struct job {
    struct nb_chat *chat;
    bool json;
};

/* Renders a request and prints its text, as it is or as {"text": ...} in a line. */
static enum nb_status render(void *ctx, const char *request, size_t len)
{
    struct job *job = ctx;
    char *text;
    size_t text_len;
    NBI_TRY(nb_chat_render(job->chat, request, len, &text, &text_len));
    enum nb_status rc = NB_OK;
    if (job->json)
        rc = cli_print_text_line(text, text_len);
    else
        fwrite(text, 1, text_len, stdout);
    free(text);
    return rc;
}

static enum nb_status render_one(struct job *job, const char *file)
{
    struct nbi_str request = {0};
    enum nb_status rc = cli_read_all(file, &request);
    if (rc == NB_OK)
        rc = nbi_context(render(job, nbi_str_text(&request), request.len), "%s",
                         file ? file : "standard input");
    nbi_str_release(&request);
    return rc;
}

static int run(void *opts)
{
    struct render_opts *o = opts;
    struct job job = {.json = o->jsonl || o->common.json};
    enum nb_status rc = nb_chat_open(&job.chat, o->common.positional[0], o->model_dir);
    if (rc == NB_OK)
        rc = o->jsonl ? cli_read_lines(o->file, render, &job) : render_one(&job, o->file);
    nb_chat_close(job.chat);
    return cli_status(rc);
}

const struct cli_command cli_render = {
    .name = "render",
    .group = "convert",
    .positional = "MODEL",
    .summary = "apply the chat template to a conversation",
    .text = "Reads {\"messages\": [...], \"tools\": [...], \"add_generation_prompt\": true,\n"
            "\"enable_thinking\": false}, where only messages is required, and writes the text\n"
            "that the model sees, byte for byte and without adding a newline. Only the chat\n"
            "template of MODEL is needed: tokenizer_config.json, chat_template.jinja or a .gguf\n"
            "file. The templates of Qwen3 are built in; for any other, plain ChatML is used, with\n"
            "a warning. A request that the template cannot render is an error.\n"
            "\n"
            "With --jsonl blank lines are skipped, and the command stops at the first line that\n"
            "fails.",
    .examples = "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' |\n"
                "      nibble render -m Qwen3-4B\n"
                "  nibble render -m Qwen3-4B --jsonl --file chats.jsonl > texts.jsonl\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct render_opts),
    .model_at = offsetof(struct render_opts, model),
    .run = run,
};
