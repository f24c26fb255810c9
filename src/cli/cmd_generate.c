/* cmd_generate.c - one answer to one prompt. */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "cli/input.h"
#include "cli/model_options.h"

struct generate_opts {
    struct cli_common common;
    struct cli_run_opts run;
    struct cli_sampling_opts sampling;
    const char *prompt, *prompt_file, *system;
    struct nbi_str text; /* the prompt itself */
    int64_t max_tokens;
    struct cli_list stop;
    bool raw, ignore_eos, timing, no_think, check_logits;
};

static const struct cli_opt options[] = {
    CLI_RUN_OPTIONS(struct generate_opts, run),
    {"prompt", 'p', CLI_STRING, offsetof(struct generate_opts, prompt), "TEXT", NULL, 0, 0,
     "the prompt to answer; -: read it from standard input", NULL},
    {"prompt-file", 0, CLI_STRING, offsetof(struct generate_opts, prompt_file), "FILE", NULL, 0, 0,
     "read the prompt from this file, without the newline at its end", NULL},
    {"max-tokens", 'n', CLI_INT, offsetof(struct generate_opts, max_tokens), "N", "0", 0, 1 << 30,
     "maximum length of the answer in tokens (0: what fits into the context)", "n-predict"},
    {"system", 0, CLI_STRING, offsetof(struct generate_opts, system), "TEXT", NULL, 0, 0,
     "a system message", NULL},
    {"raw", 0, CLI_FLAG, offsetof(struct generate_opts, raw), NULL, NULL, 0, 0,
     "continue the prompt as given, without the chat template", NULL},
    {"no-think", 0, CLI_FLAG, offsetof(struct generate_opts, no_think), NULL, NULL, 0, 0,
     "turn thinking off, if the chat template supports it", NULL},
    CLI_SAMPLING_OPTIONS(struct generate_opts, sampling),
    {"stop", 0, CLI_LIST, offsetof(struct generate_opts, stop), "TEXT", NULL, 0, 0,
     "end the answer before TEXT (repeatable)", NULL},
    {"ignore-eos", 0, CLI_FLAG, offsetof(struct generate_opts, ignore_eos), NULL, NULL, 0, 0,
     "do not stop at the end of the turn", NULL},
    {"check-logits", 0, CLI_FLAG, offsetof(struct generate_opts, check_logits), NULL, NULL, 0, 0,
     "print a checksum of the last logits on stderr, for comparing runs", NULL},
    {"timing", 0, CLI_FLAG, offsetof(struct generate_opts, timing), NULL, NULL, 0, 0,
     "print the speed on stderr", NULL},
};

static enum nb_status check_utf8(const char *what, const char *text, size_t len)
{
    const char *p = text, *end = text + len;
    for (int n; p < end; p += n) {
        n = nbi_utf8_length(p, end);
        if (n == 0)
            return nbi_fail(NB_EVALUE,
                            "the %s is not UTF-8: byte %zu of %zu is 0x%02X; iconv(1) converts it",
                            what, (size_t)(p - text) + 1, len, (unsigned char)*p);
    }
    return NB_OK;
}

/* The prompt's text, from wherever it is to come. */
static enum nb_status read_prompt(struct generate_opts *o)
{
    struct nbi_str *text = &o->text;
    bool input = o->prompt && strcmp(o->prompt, "-") == 0;
    if (o->prompt_file || input) {
        NBI_TRY(cli_read_all(o->prompt_file, text));
        bool line_end = text->len > 0 && text->p[text->len - 1] == '\n';
        text->len -= line_end;
        if (line_end && text->len > 0 && text->p[text->len - 1] == '\r')
            text->len--;
    } else {
        nbi_str_puts(text, o->prompt);
        NBI_TRY(nbi_str_status(text));
    }
    NBI_TRY(check_utf8("prompt", nbi_str_text(text), text->len));
    return o->system ? check_utf8("system message", o->system, strlen(o->system)) : NB_OK;
}

static enum nb_status render(const struct generate_opts *o, const struct nb_chat *chat, char **text,
                             size_t *len)
{
    struct nb_message messages[2];
    size_t count = 0;
    if (o->system)
        messages[count++] = (struct nb_message){NB_ROLE_SYSTEM, o->system, strlen(o->system)};
    messages[count++] = (struct nb_message){NB_ROLE_USER, nbi_str_text(&o->text), o->text.len};
    return nb_chat_prompt(chat, messages, count, !o->no_think, text, len);
}

static enum nb_status make_prompt(const struct generate_opts *o, const struct nb_engine *engine,
                                  int32_t **ids, size_t *count)
{
    struct nb_tokenizer *t = nb_engine_tokenizer(engine);
    char *text = NULL;
    size_t len = 0;
    if (!t)
        return nbi_fail(NB_ENOTFOUND, "'%s' has no tokenizer; --model-dir DIR says where one is",
                        o->run.model);
    if (o->raw)
        return nb_tokenizer_encode(t, nbi_str_text(&o->text), o->text.len, true, ids, count);
    NBI_TRY(render(o, nb_engine_chat(engine), &text, &len));
    enum nb_status rc = nb_tokenizer_encode(t, text, len, true, ids, count);
    free(text);
    return rc;
}

static enum nb_status print_text(void *ctx, const char *text, size_t len)
{
    (void)ctx;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
    NBI_TRY(nbi_check_interrupt()); /* which may be why it could not be written */
    return cli_check_stdout();
}

static json_t *result_json(const struct nb_generate_result *r, bool *ok)
{
    json_t *ids = json_array();
    for (size_t i = 0; i < r->count; i++)
        nbi_json_append(ids, json_integer(r->ids[i]), ok);
    json_t *timings = json_pack("{s:f,s:f,s:f,s:f}", "prompt_ms", r->prompt_seconds * 1e3,
                                "prompt_per_s", cli_prompt_speed(r), "decode_ms", r->seconds * 1e3,
                                "decode_per_s", cli_decode_speed(r));
    return json_pack("{s:s%,s:o,s:I,s:I,s:s,s:o}", "text", r->text, r->len, "ids", ids,
                     "prompt_tokens", (json_int_t)r->prompt_tokens, "completion_tokens",
                     (json_int_t)r->count, "finish_reason", cli_finish_reason(r->finish), "timings",
                     timings);
}

static enum nb_status generate(struct generate_opts *o, const struct nb_engine *engine,
                               struct nb_generate_result *r)
{
    struct nb_session *session = NULL;
    int32_t *ids = NULL;
    size_t count = 0;
    struct nb_generate_opts g = {.max_tokens = o->max_tokens,
                                 .stop = o->stop.items,
                                 .ignore_eos = o->ignore_eos,
                                 .check_logits = o->check_logits,
                                 .text = o->common.json ? NULL : print_text};
    cli_sampling(&g.sampling, engine, &o->sampling);
    enum nb_status rc = make_prompt(o, engine, &ids, &count);
    if (rc == NB_OK)
        rc = cli_session_open(&session, engine, &o->run);
    if (rc == NB_OK)
        rc = nb_generate(session, ids, count, &g, r);
    free(ids);
    nb_session_close(session);
    return rc;
}

static int run(void *opts)
{
    struct generate_opts *o = opts;
    struct nb_engine *engine = NULL;
    struct nb_generate_result r = {0};
    const char *wrong = !o->run.model                   ? "-m MODEL is missing"
                        : !o->prompt && !o->prompt_file ? "-p PROMPT is missing"
                        : o->prompt && o->prompt_file   ? "give -p or --prompt-file, not both"
                                                        : NULL;
    if (wrong) {
        fprintf(stderr, "nibble generate: %s; see 'nibble help generate'\n", wrong);
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = read_prompt(o);
    if (rc == NB_OK)
        rc = cli_engine_open(&engine, &o->run, &o->common);
    if (rc == NB_OK)
        rc = generate(o, engine, &r);
    int code;
    if (rc == NB_OK && o->common.json) {
        bool ok = true;
        json_t *json = result_json(&r, &ok);
        code = cli_print_json(json, ok);
    } else {
        if (r.text)
            putchar('\n');
        code = cli_status(rc);
    }
    if (rc == NB_OK && o->check_logits)
        fprintf(stderr, "logits: all finite, the last ones have crc32c %08x\n", r.logits_crc);
    if (rc == NB_OK && o->timing)
        cli_print_timing(&r);
    nb_generate_result_release(&r);
    nb_engine_close(engine);
    nbi_str_release(&o->text);
    return code;
}

const struct cli_command cli_generate = {
    .name = "generate",
    .group = "run",
    .positional = "",
    .summary = "answer a prompt",
    .text = "Prints the answer as it is generated. The model's chat template is applied to the\n"
            "prompt, unless --raw is given. Sampling settings that are not given come from the\n"
            "model's generation_config.json. The same seed gives the same text.",
    .examples = "  nibble generate -m Qwen3-4B -p 'What is a nibble?' -n 200\n"
                "  nibble generate -m Qwen3-4B --raw -p 'Once upon a time' --temp 0 --json\n"
                "  nibble generate -m Qwen3-4B -p - < question.txt\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct generate_opts),
    .any_device = true,
    .run = run,
};
