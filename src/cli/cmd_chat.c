/* cmd_chat.c - a conversation: on a terminal, from a pipe, or replayed from a log. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/array.h"
#include "base/file.h"
#include "base/jscan.h"
#include "base/sys.h"
#include "base/utf8.h"
#include "cli/chat_log.h"
#include "cli/line.h"
#include "cli/model_options.h"
#include "cli/terminal.h"
#include "cli/wrap.h"

#define DIM   "\033[2m"
#define PLAIN "\033[0m"

struct chat_opts {
    struct cli_common common;
    struct cli_run_opts run;
    struct cli_sampling_opts sampling;
    const char *prompt, *system, *log, *replay;
    int64_t max_tokens;
    struct cli_list stop;
    bool no_think, ignore_eos, timing;
};

static const struct cli_opt options[] = {
    CLI_RUN_OPTIONS(struct chat_opts, run),
    {"prompt", 'p', CLI_STRING, offsetof(struct chat_opts, prompt), "TEXT", NULL, 0, 0,
     "first message", NULL},
    {"system", 0, CLI_STRING, offsetof(struct chat_opts, system), "TEXT", NULL, 0, 0,
     "a system message", NULL},
    {"max-tokens", 'n', CLI_INT, offsetof(struct chat_opts, max_tokens), "N", "0", 0, 1 << 30,
     "maximum length of an answer in tokens (0: what fits into the context)", "n-predict"},
    {"no-think", 0, CLI_FLAG, offsetof(struct chat_opts, no_think), NULL, NULL, 0, 0,
     "turn thinking off, if the chat template supports it", NULL},
    CLI_SAMPLING_OPTIONS(struct chat_opts, sampling),
    {"stop", 0, CLI_LIST, offsetof(struct chat_opts, stop), "TEXT", NULL, 0, 0,
     "end an answer before TEXT (repeatable)", NULL},
    {"ignore-eos", 0, CLI_FLAG, offsetof(struct chat_opts, ignore_eos), NULL, NULL, 0, 0,
     "do not stop at the end of the turn", NULL},
    {"log", 0, CLI_STRING, offsetof(struct chat_opts, log), "FILE", NULL, 0, 0,
     "append the conversation to FILE, as JSON Lines", NULL},
    {"replay", 0, CLI_STRING, offsetof(struct chat_opts, replay), "FILE", NULL, 0, 0,
     "send the messages of a log or saved conversation again, then exit", NULL},
    {"timing", 0, CLI_FLAG, offsetof(struct chat_opts, timing), NULL, NULL, 0, 0,
     "print the speed of each answer on stderr", NULL},
};

/* Totals over all answers. */
struct totals {
    int64_t answers, prompt, reused, decoded;
    double prompt_seconds, seconds;
};

struct chat {
    const struct chat_opts *o;
    struct nb_engine *engine;
    struct nb_session *session;
    struct nb_conversation *talk;
    struct nb_generate_opts generate;
    struct cli_chat_log log;
    bool terminal; /* somebody types */
    bool screen;   /* somebody may see standard output, in colour or not */
    bool colour;
    bool begun;                     /* something was said since the start */
    bool quit;                      /* somebody asked to leave */
    bool thinking;                  /* what is printed is a thought */
    struct cli_wrap wrap;           /* of what is printed on a screen */
    size_t shown;                   /* bytes of the answer that were printed */
    size_t matched;                 /* of the end of the thought */
    uint64_t seed;                  /* of the first answer; each later one has the next */
    int64_t since_start;            /* answers */
    struct nb_generate_result last; /* its numbers, not its text */
    struct totals all;
    char *file; /* saved to or loaded from last; NULL: none */
};

/* Prints a remark, unless --quiet. */
static void note(const struct chat *c, const char *text)
{
    bool dim = c->colour && isatty(STDERR_FILENO);
    if (!c->o->common.quiet)
        fprintf(stderr, "%s(%s)%s\n", dim ? DIM : "", text, dim ? PLAIN : "");
}

/* ---- printing ---- */

/* Prints whole characters; control characters become '?'. */
static void put_safely(FILE *out, const char *text, size_t len)
{
    const char *end = text + len;
    for (int n; text < end; text += n) {
        n = nbi_utf8_length(text, end);
        bool safe =
            n > 0 && (*text == '\n' || *text == '\t' || nbi_utf8_printable(text, (size_t)n));
        n = n > 0 ? n : 1;
        fwrite(safe ? text : "?", 1, safe ? (size_t)n : 1, out);
    }
}

/* How much of text belongs to the model's thinking: up to and including its end mark. */
static size_t thought_length(struct chat *c, const char *text, size_t len)
{
    static const char mark[] = NB_THINK_END;
    for (size_t i = 0; i < len; i++) {
        c->matched = text[i] == mark[c->matched] ? c->matched + 1 : text[i] == mark[0];
        if (!mark[c->matched])
            return i + 1;
    }
    return len;
}

static void put_coloured(struct chat *c, const char *text, size_t len)
{
    static const char mark[] = NB_THINK_START;
    size_t first = 0;
    if (c->shown == 0 && len >= strlen(mark) && memcmp(text, mark, strlen(mark)) == 0) {
        c->thinking = true;
        c->matched = 0;
        cli_wrap_sequence(&c->wrap, DIM);
    }
    if (c->thinking) {
        first = thought_length(c, text, len);
        cli_wrap_text(&c->wrap, text, first);
        if (first < len || c->matched == strlen(NB_THINK_END)) {
            c->thinking = false;
            cli_wrap_sequence(&c->wrap, PLAIN);
        }
    }
    cli_wrap_text(&c->wrap, text + first, len - first);
}

static void follow_window(struct chat *c)
{
    size_t columns, rows;
    cli_terminal_size(STDOUT_FILENO, &columns, &rows);
    cli_wrap_resize(&c->wrap, columns);
}

/* Prints a message that nobody types. */
static void print_message(struct chat *c, const char *text, size_t len)
{
    static const char prompt[] = ">>> ";
    cli_wrap_begin(&c->wrap, stdout);
    if (c->screen) {
        follow_window(c);
        cli_wrap_text(&c->wrap, prompt, strlen(prompt));
        cli_wrap_text(&c->wrap, text, len);
        cli_wrap_end(&c->wrap);
    } else {
        fputs(prompt, stdout);
        put_safely(stdout, text, len);
    }
    putchar('\n');
}

/* A piece of an answer. */
static enum nb_status print_piece(void *ctx, const char *text, size_t len)
{
    struct chat *c = ctx;
    if (c->screen)
        follow_window(c);
    if (c->colour)
        put_coloured(c, text, len);
    else if (c->screen)
        cli_wrap_text(&c->wrap, text, len);
    else
        fwrite(text, 1, len, stdout);
    c->shown += len;
    fflush(stdout);
    return cli_check_stdout();
}

static void end_text(struct chat *c)
{
    cli_wrap_end(&c->wrap);
    fputs(c->thinking ? PLAIN "\n" : "\n", stdout);
    c->thinking = false;
}

static enum nb_status print_end(struct chat *c, const struct nb_generate_result *r,
                                bool interrupted)
{
    struct nbi_str line = {0};
    if (!c->o->common.json) {
        end_text(c);
    } else {
        cli_chat_put_answer(&line, r, interrupted);
        enum nb_status rc = nbi_str_status(&line);
        if (rc == NB_OK)
            printf("{%s}\n", nbi_str_text(&line));
        nbi_str_release(&line);
        NBI_TRY(rc);
    }
    fflush(stdout);
    return cli_check_stdout();
}

/* ---- answers ---- */

static void count(struct chat *c, const struct nb_generate_result *r)
{
    c->last = *r;
    c->last.text = NULL;
    c->last.ids = NULL;
    c->since_start++;
    c->all.answers++;
    c->all.prompt += r->prompt_tokens;
    c->all.reused += r->reused_tokens;
    c->all.decoded += (int64_t)r->count;
    c->all.prompt_seconds += r->prompt_seconds;
    c->all.seconds += r->seconds;
}

/* Logs and reports a finished answer. */
static enum nb_status conclude(struct chat *c, const char *text, size_t len,
                               const struct nb_generate_result *r, bool interrupted)
{
    count(c, r);
    enum nb_status rc = print_end(c, r, interrupted);
    if (interrupted)
        note(c, "stopped; what was said so far counts");
    else if (r->finish == NB_FINISH_CONTEXT)
        note(c, "the context is full, the answer ends here; /reset forgets the conversation, "
                "--ctx N makes room for a longer one");
    else if (r->finish == NB_FINISH_LENGTH)
        note(c, "cut at --max-tokens");
    if (c->o->timing)
        cli_print_timing(r);
    if (rc == NB_OK)
        rc = cli_chat_log_message(&c->log, NB_ROLE_USER, text, len);
    if (rc == NB_OK)
        rc = cli_chat_log_answer(&c->log, r, interrupted);
    return rc;
}

static enum nb_status context_full(const struct chat *c, const struct nb_generate_result *r)
{
    struct nb_conversation_info info;
    nb_conversation_info(c->talk, &info);
    return nbi_fail(NB_EVALUE,
                    "the conversation would have %lld tokens with this message, more than the "
                    "context of %lld; /reset forgets it, --ctx N makes room for more",
                    (long long)r->prompt_tokens, (long long)info.context);
}

/* The answer, without keys and the "^C" of the terminal in it. */
static enum nb_status answer(struct chat *c, const char *text, size_t len,
                             const struct nb_generate_opts *g, struct nb_generate_result *r)
{
    struct termios before;
    bool set = c->terminal && !cli_terminal_is_dumb() && cli_terminal_begin_output(&before);
    enum nb_status rc = nb_conversation_answer(c->talk, text, len, g, r);
    if (set && rc == NB_EINTERRUPTED)
        cli_terminal_forget_keys();
    if (set)
        cli_terminal_end_output(&before);
    return rc;
}

/* Sends a message and prints the answer. limit: its tokens; 0: as the options say. */
static enum nb_status send_message(struct chat *c, const char *text, size_t len, int64_t limit)
{
    struct nb_generate_result r;
    struct nb_generate_opts g = c->generate;
    g.max_tokens = limit > 0 ? limit : g.max_tokens;
    g.sampling.seed = c->seed + (uint64_t)c->since_start;
    c->shown = 0;
    c->begun = true;
    cli_wrap_begin(&c->wrap, stdout);
    enum nb_status rc = answer(c, text, len, &g, &r);
    bool interrupted = rc == NB_EINTERRUPTED && c->terminal && cli_resume();
    if (rc == NB_OK || (interrupted && r.count > 0))
        rc = conclude(c, text, len, &r, interrupted);
    else if (c->shown > 0)
        end_text(c);
    else if (interrupted)
        note(c, "stopped before the answer began; the message does not count");
    else if (rc == NB_EVALUE && r.prompt_tokens > 0)
        rc = context_full(c, &r);
    if (interrupted && rc == NB_EINTERRUPTED)
        rc = NB_OK;
    nb_generate_result_release(&r);
    return rc;
}

static enum nb_status set_system(struct chat *c, const char *text, size_t len)
{
    const struct nb_message m = {NB_ROLE_SYSTEM, text, len};
    c->begun = true;
    NBI_TRY(nb_conversation_add(c->talk, &m));
    return cli_chat_log_message(&c->log, m.role, m.text, m.len);
}

/* Starts over: no messages but --system. */
static enum nb_status start(struct chat *c)
{
    struct nb_conversation_info info;
    nb_conversation_info(c->talk, &info);
    const struct cli_chat_settings s = {.model = c->o->run.model,
                                        .generate = &c->generate,
                                        .context = info.context,
                                        .think = !c->o->no_think};
    nb_conversation_reset(c->talk);
    c->since_start = 0;
    NBI_TRY(cli_chat_log_start(&c->log, &s));
    const char *system = c->o->system ? c->o->system : "";
    if (*system || c->begun)
        NBI_TRY(set_system(c, system, strlen(system)));
    c->begun = false;
    return NB_OK;
}

/* ---- commands ---- */

struct command {
    const char *name, *arg, *help;
    enum nb_status (*run)(struct chat *c, const char *arg);
};

static const struct command commands[];

static enum nb_status run_reset(struct chat *c, const char *arg)
{
    (void)arg;
    nb_conversation_reset(c->talk);
    note(c, "forgotten");
    return cli_chat_log_reset(&c->log);
}

static enum nb_status run_system(struct chat *c, const char *arg)
{
    struct nb_conversation_info info;
    struct nb_message m = {0};
    if (*arg)
        return set_system(c, arg, strcmp(arg, "\"\"") == 0 ? 0 : strlen(arg));
    nb_conversation_info(c->talk, &info);
    if (info.messages > 0)
        nb_conversation_message(c->talk, 0, &m);
    if (info.messages > 0 && m.role == NB_ROLE_SYSTEM)
        put_safely(stderr, m.text, m.len);
    else
        fputs("there is no system message", stderr);
    fputc('\n', stderr);
    return NB_OK;
}

/* Remembers the file of the conversation, which /save may overwrite. */
static enum nb_status set_file(struct chat *c, const char *path)
{
    char *copy = strdup(path);
    if (!copy)
        return nbi_fail_memory("a path", strlen(path));
    free(c->file);
    c->file = copy;
    return NB_OK;
}

static enum nb_status run_save(struct chat *c, const char *arg)
{
    if (!*arg)
        return nbi_fail(NB_EINVAL, "/save needs the name of a file");
    if (nbi_path_exists(arg) && !(c->file && nbi_path_same(arg, c->file)))
        return nbi_fail(NB_EINVAL, "'%s' is there already; take another name", arg);
    NBI_TRY(nb_conversation_save(c->talk, arg));
    note(c, "saved");
    return set_file(c, arg);
}

static enum nb_status run_load(struct chat *c, const char *arg)
{
    struct nb_conversation_info info;
    char text[64];
    if (!*arg)
        return nbi_fail(NB_EINVAL, "/load needs the name of a file");
    NBI_TRY(nb_conversation_load(c->talk, arg));
    nb_conversation_info(c->talk, &info);
    snprintf(text, sizeof text, "%lld messages", (long long)info.messages);
    note(c, text);
    c->begun = true;
    NBI_TRY(set_file(c, arg));
    return cli_chat_log_load(&c->log, c->talk);
}

static enum nb_status run_stats(struct chat *c, const char *arg)
{
    struct nb_conversation_info info;
    struct nb_engine_info engine;
    char weights[32], peak[32];
    const struct totals *t = &c->all;
    (void)arg;
    nb_conversation_info(c->talk, &info);
    nb_engine_info(c->engine, &engine);
    fprintf(stderr, "context: %lld of %lld tokens, %lld messages\n", (long long)info.tokens,
            (long long)info.context, (long long)info.messages);
    if (t->answers > 0)
        fprintf(stderr,
                "last:    prompt of %lld tokens, %lld of them reused, %.1f tok/s; answer of %zu "
                "tokens, %.1f tok/s\n"
                "all:     %lld answers; %lld tokens of prompts, %lld reused, %.1f tok/s; %lld "
                "tokens of answers, %.1f tok/s\n",
                (long long)c->last.prompt_tokens, (long long)c->last.reused_tokens,
                cli_prompt_speed(&c->last), c->last.count, cli_decode_speed(&c->last),
                (long long)t->answers, (long long)t->prompt, (long long)t->reused,
                (double)(t->prompt - t->reused) / t->prompt_seconds, (long long)t->decoded,
                t->decoded > t->answers ? (double)(t->decoded - t->answers) / t->seconds : 0);
    fprintf(stderr, "memory:  weights %s, the process %s at most\n",
            nbi_format_bytes(weights, (double)engine.weight_bytes),
            nbi_format_bytes(peak, (double)nbi_peak_rss()));
    return NB_OK;
}

static enum nb_status run_quit(struct chat *c, const char *arg)
{
    (void)arg;
    c->quit = true;
    return NB_OK;
}

static enum nb_status run_help(struct chat *c, const char *arg)
{
    (void)c;
    (void)arg;
    for (const struct command *k = commands; k->name; k++)
        if (k->help)
            fprintf(stderr, "  /%-7s %-6s %s\n", k->name, k->arg, k->help);
    fputs("A message of several lines: paste it, or end lines with \\, or put \"\"\" before and "
          "after it.\n"
          "A message that begins with a slash: write two of them.\n"
          "Ctrl-C stops an answer, or clears the line; Ctrl-D leaves.\n",
          stderr);
    return NB_OK;
}

static const struct command commands[] = {
    {"help", "", "this list", run_help},
    {"reset", "", "forget the conversation, but not the system message", run_reset},
    {"system", "[TEXT]", "set the system message, or show it; \"\" takes it away", run_system},
    {"save", "FILE", "save the conversation, as a line {\"messages\": [...]}", run_save},
    {"load", "FILE", "go on with a saved or logged conversation instead", run_load},
    {"stats", "", "tokens, speed, memory", run_stats},
    {"quit", "", "leave", run_quit},
    {"exit", "", NULL, run_quit},
    {NULL, NULL, NULL, NULL},
};

/* line: without the slash; may be changed. */
static enum nb_status run_command(struct chat *c, char *line)
{
    const char *names[16];
    size_t n = 0;
    char *arg = line + strcspn(line, " \t");
    if (*arg)
        *arg++ = 0;
    arg += strspn(arg, " \t");
    for (size_t len = strlen(arg); len > 0 && strchr(" \t", arg[len - 1]);)
        arg[--len] = 0;
    for (const struct command *k = commands; k->name; k++) {
        names[n++] = k->name;
        if (strcmp(k->name, line) != 0)
            continue;
        if (*arg && !*k->arg)
            return nbi_fail(NB_EINVAL, "/%s takes no argument", k->name);
        return k->run(c, arg);
    }
    const char *near = cli_nearest(line, names, n);
    return nbi_fail(NB_EINVAL, "unknown command '/%s'%s%s%s; /help lists them", line,
                    near ? " (did you mean '/" : "", near ? near : "", near ? "'?)" : "");
}

/* ---- the loop ---- */

/* whole: a line as it was typed, which may be a command. */
static enum nb_status take(struct chat *c, struct nbi_str *message, bool whole)
{
    char *text = message->p;
    if (whole && text[0] == '/' && text[1] != '/')
        return run_command(c, text + 1);
    size_t skip = whole && text[0] == '/';
    return send_message(c, text + skip, message->len - skip, 0);
}

/* On a terminal, errors are printed and Ctrl-C clears the line; elsewhere both end the chat. */
static enum nb_status talk(struct chat *c, struct cli_lines *lines)
{
    struct nbi_str message = {0};
    enum nb_status rc = NB_OK;
    int idle = 0; /* Ctrl-C in a row */
    for (bool more = true, whole; rc == NB_OK && !c->quit;) {
        rc = cli_lines_next(lines, &message, &whole, &more);
        if (rc == NB_OK && !more)
            break;
        if (rc == NB_EINTERRUPTED && c->terminal && cli_resume()) {
            if (++idle == 2)
                note(c, "/quit or Ctrl-D leaves");
            rc = NB_OK;
            continue;
        }
        if (rc != NB_OK)
            break;
        idle = 0;
        if (c->terminal && !cli_resume()) /* a Ctrl-C from before must not stop this answer */
            rc = nbi_check_interrupt();
        else
            rc = take(c, &message, whole);
        if (c->terminal && rc != NB_OK && rc != NB_EINTERRUPTED) {
            cli_status(rc);
            rc = NB_OK;
        }
    }
    nbi_str_release(&message);
    return rc;
}

static void greet(const struct chat *c)
{
    struct nb_engine_info engine;
    struct nb_conversation_info info;
    nb_engine_info(c->engine, &engine);
    nb_conversation_info(c->talk, &info);
    if (!c->o->common.quiet)
        fprintf(stderr, "%s on %s (%s, %d threads), context of %lld tokens; /help lists commands\n",
                c->o->run.model, engine.device, engine.simd, engine.threads,
                (long long)info.context);
}

static enum nb_status talk_live(struct chat *c)
{
    struct cli_lines *lines = NULL;
    if (c->terminal) {
        greet(c);
        cli_survive_interrupts();
    }
    NBI_TRY(start(c));
    if (c->o->prompt)
        NBI_TRY(send_message(c, c->o->prompt, strlen(c->o->prompt), 0));
    NBI_TRY(cli_lines_open(&lines, c->terminal));
    enum nb_status rc = talk(c, lines);
    cli_lines_close(lines);
    return rc;
}

/* ---- replay ---- */

/* A transcript in memory: read and checked before the model is loaded. */
struct replay {
    struct nbi_arena arena;
    struct nb_transcript_item *items;
    size_t count, capacity;
};

static enum nb_status collect(void *ctx, const struct nb_transcript_item *item)
{
    struct replay *r = ctx;
    char *text = NULL;
    if (item->cut > 0 && r->count > 0) /* the question is to be answered at that length */
        r->items[r->count - 1].cut = item->cut;
    NBI_TRY(NBI_ARRAY_RESERVE(r->items, r->capacity, r->count + 1, "messages"));
    NBI_TRY(nbi_arena_string(&r->arena, "messages", item->message.text ? item->message.text : "",
                             item->message.len, &text));
    r->items[r->count] = *item;
    r->items[r->count++].message.text = text;
    return NB_OK;
}

static enum nb_status replay_item(struct chat *c, const struct nb_transcript_item *item)
{
    const struct nb_message *m = &item->message;
    switch (item->kind) {
    case NB_ITEM_START:
        return c->begun ? start(c) : NB_OK;
    case NB_ITEM_RESET:
        nb_conversation_reset(c->talk);
        return cli_chat_log_reset(&c->log);
    case NB_ITEM_LOADED:
        c->begun = true;
        return nb_conversation_add(c->talk, m);
    case NB_ITEM_MESSAGE:
        break;
    }
    if (m->role == NB_ROLE_SYSTEM)
        return set_system(c, m->text, m->len);
    if (m->role == NB_ROLE_ASSISTANT)
        return NB_OK;
    if (!c->o->common.json)
        print_message(c, m->text, m->len);
    return send_message(c, m->text, m->len, item->cut);
}

static enum nb_status replay(struct chat *c, const struct replay *r)
{
    NBI_TRY(start(c));
    for (size_t i = 0; i < r->count; i++) {
        NBI_TRY(replay_item(c, &r->items[i]));
        bool last = i + 1 == r->count || r->items[i + 1].kind != NB_ITEM_LOADED;
        if (r->items[i].kind == NB_ITEM_LOADED && last)
            NBI_TRY(cli_chat_log_load(&c->log, c->talk));
    }
    return NB_OK;
}

/* ---- the command ---- */

static enum nb_status open_chat(struct chat *c)
{
    const struct chat_opts *o = c->o;
    const char *no_colour = getenv("NO_COLOR");
    c->screen = isatty(STDOUT_FILENO);
    c->terminal = c->screen && !o->replay && isatty(STDIN_FILENO);
    c->colour = c->screen && !(no_colour && *no_colour) && !cli_terminal_is_dumb();
    c->generate = (struct nb_generate_opts){.max_tokens = o->max_tokens,
                                            .stop = o->stop.items,
                                            .ignore_eos = o->ignore_eos,
                                            .text = o->common.json ? NULL : print_piece,
                                            .ctx = c};
    NBI_TRY(cli_chat_log_open(&c->log, o->log));
    NBI_TRY(cli_engine_open(&c->engine, &o->run, &o->common));
    cli_sampling(&c->generate.sampling, c->engine, &o->sampling);
    c->seed = c->generate.sampling.seed;
    NBI_TRY(cli_session_open(&c->session, c->engine, &o->run));
    return nb_conversation_open(&c->talk, c->session, !o->no_think);
}

static int run(void *opts)
{
    struct chat c = {.o = opts};
    if (!c.o->run.model || (c.o->prompt && c.o->replay)) {
        fprintf(stderr, "nibble chat: %s; see 'nibble help chat'\n",
                c.o->run.model ? "-p and --replay exclude each other" : "-m MODEL is missing");
        return CLI_EXIT_USAGE;
    }
    struct replay r = {0};
    enum nb_status rc = c.o->replay ? nb_transcript_read(c.o->replay, collect, &r) : NB_OK;
    if (rc == NB_OK)
        rc = open_chat(&c);
    if (rc == NB_OK)
        rc = c.o->replay ? replay(&c, &r) : talk_live(&c);
    int code = cli_status(rc);
    nbi_arena_release(&r.arena);
    free(r.items);
    cli_chat_log_close(&c.log);
    nb_conversation_close(c.talk);
    nb_session_close(c.session);
    nb_engine_close(c.engine);
    free(c.file);
    return code;
}

const struct cli_command cli_chat = {
    .name = "chat",
    .group = "run",
    .positional = "",
    .summary = "chat with a model",
    .text = "Answers messages one after another and prints each answer as it is generated. The KV\n"
            "cache of the conversation is kept, so only new tokens are computed. On a terminal,\n"
            "lines can be edited, and earlier ones are kept in $XDG_STATE_HOME/nibble/history (by\n"
            "default in ~/.local/state). /help lists the commands: /reset, /system, /save, /load,\n"
            "/stats, /quit. Ctrl-C stops the answer and keeps what has been printed; Ctrl-D\n"
            "exits. Pasted text is one message. To type a message of several lines, end lines\n"
            "with a backslash, or put \"\"\" before and after the text.\n"
            "\n"
            "Without a terminal, standard input has one message or command per line, and standard\n"
            "output gets only the answers (with --json, a line of JSON for each). The first error\n"
            "ends the conversation.\n"
            "\n"
            "/save writes a line {\"messages\": [...]}, which is also a data set and an input of\n"
            "'render'. --log appends a line for each message, with times, token counts and\n"
            "settings. --replay and /load read either; the same settings and seed give the same\n"
            "answers. Each answer has its own seed: the given one, then that plus one, and so on.",
    .examples = "  nibble chat -m Qwen3-4B --system 'Be brief.' --log talk.jsonl\n"
                "  nibble chat -m Qwen3-4B --replay talk.jsonl --temp 0\n"
                "  printf 'Hello!\\nAnd now in French.\\n' | nibble chat -m Qwen3-4B -q\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct chat_opts),
    .any_device = true,
    .run = run,
};
