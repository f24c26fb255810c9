/* line.c - reads lines, edited on a terminal and plain elsewhere. */
#include "cli/line.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/history.h"
#include "cli/input.h"
#include "cli/line_editor.h"
#include "cli/terminal.h"

#define BLOCK "\"\"\""

struct cli_lines {
    struct cli_input in; /* where lines are not edited */
    bool terminal, edited;
    struct cli_history history;
    char *history_path; /* NULL: not kept */
    struct cli_terminal device;
    struct cli_editor editor;
    const char *prompt;
    struct nbi_str line;
};

/* ---- the terminal ---- */

/* Draws the line if it has changed. */
static enum nb_status refresh(struct cli_lines *l)
{
    size_t columns, rows;
    cli_terminal_size(STDOUT_FILENO, &columns, &rows);
    cli_editor_resize(&l->editor, columns, rows);
    NBI_TRY(cli_editor_refresh(&l->editor));
    return cli_terminal_write(&l->editor.out);
}

/* Stops the process, or ends it. */
static enum nb_status send_signal(struct cli_lines *l, int signal)
{
    NBI_TRY(cli_editor_leave(&l->editor, false));
    NBI_TRY(cli_terminal_write(&l->editor.out));
    NBI_TRY(cli_terminal_signal(&l->device, signal));
    cli_editor_draw_anew(&l->editor);
    return NB_OK;
}

/* Nothing was typed for a moment. */
static enum nb_status pause_keys(struct cli_lines *l)
{
    bool changed;
    NBI_TRY(cli_editor_pause(&l->editor));
    NBI_TRY(cli_terminal_check(&l->device, &changed));
    if (changed)
        cli_editor_draw_anew(&l->editor);
    return NB_OK;
}

/* Consumes the bytes received, to the end of the line at most. */
static enum nb_status take_bytes(struct cli_lines *l, enum cli_editor_event *event)
{
    struct cli_terminal *t = &l->device;
    while (t->at < t->len && *event == CLI_EDITOR_GOES_ON) {
        NBI_TRY(cli_editor_feed(&l->editor, t->buffer[t->at++], event));
        if (*event == CLI_EDITOR_SUSPEND || *event == CLI_EDITOR_QUIT) {
            NBI_TRY(send_signal(l, *event == CLI_EDITOR_QUIT ? SIGQUIT : SIGTSTP));
            *event = CLI_EDITOR_GOES_ON;
        }
    }
    return NB_OK;
}

static enum nb_status take_keys(struct cli_lines *l, enum cli_editor_event *event)
{
    while (*event == CLI_EDITOR_GOES_ON) {
        enum cli_terminal_input input;
        if (l->device.at == l->device.len)
            NBI_TRY(refresh(l));
        NBI_TRY(cli_terminal_wait(&l->device, &input));
        if (input == CLI_TERMINAL_END)
            *event = CLI_EDITOR_ENDED;
        else if (input == CLI_TERMINAL_PAUSE)
            NBI_TRY(pause_keys(l));
        else
            NBI_TRY(take_bytes(l, event));
    }
    return refresh(l);
}

/* *more false: the input has ended. */
static enum nb_status edit_line(struct cli_lines *l, bool *more)
{
    enum cli_editor_event event = CLI_EDITOR_GOES_ON;
    struct cli_editor *e = &l->editor;
    cli_editor_begin(e, l->prompt, &l->history);
    NBI_TRY(cli_terminal_enter(&l->device));
    enum nb_status rc = take_keys(l, &event);
    *more = event == CLI_EDITOR_ACCEPTED;
    bool erased = rc == NB_EINTERRUPTED;
    enum nb_status left = erased ? cli_editor_erase(e) : cli_editor_leave(e, *more);
    if (left == NB_OK)
        left = cli_terminal_write(&e->out);
    cli_terminal_leave(&l->device, !erased);
    if (rc != NB_OK) { /* Ctrl-C also forgets what was typed before it and is not read */
        cli_terminal_forget_keys();
        l->device.at = l->device.len = 0;
        cli_keys_reset(&e->keys);
        return rc;
    }
    NBI_TRY(left);
    nbi_str_append(&l->line, e->edit.text, *more ? e->edit.len : 0);
    return nbi_str_status(&l->line);
}

/* Reads a line from a terminal without cursor movement. */
static enum nb_status plain_line(struct cli_lines *l, bool *more)
{
    fputs(l->prompt, stdout);
    enum nb_status rc = cli_input_line(&l->in, &l->line, more);
    if (rc != NB_OK || !*more) {
        putchar('\n');
        fflush(stdout);
    }
    return rc;
}

/* ---- open and close ---- */

enum nb_status cli_lines_open(struct cli_lines **out, bool terminal)
{
    struct cli_lines *l = *out = calloc(1, sizeof *l);
    if (!l)
        return nbi_fail_memory("lines", sizeof *l);
    l->terminal = terminal;
    l->edited = terminal && !cli_terminal_is_dumb();
    if (terminal) {
        l->history_path = cli_history_find();
        cli_history_load(&l->history, l->history_path);
    }
    enum nb_status rc = l->edited ? NB_OK : cli_input_open(&l->in, NULL);
    if (rc != NB_OK) {
        cli_lines_close(l);
        *out = NULL;
    }
    return rc;
}

void cli_lines_close(struct cli_lines *l)
{
    if (!l)
        return;
    cli_editor_release(&l->editor);
    cli_history_release(&l->history);
    free(l->history_path);
    nbi_str_release(&l->line);
    free(l);
}

/* ---- messages ---- */

/* The next line without its end, in l->line. */
static enum nb_status next_line(struct cli_lines *l, bool goes_on, bool *more)
{
    l->prompt = goes_on ? "... " : ">>> ";
    l->line.len = 0;
    if (l->edited)
        return edit_line(l, more);
    NBI_TRY(l->terminal ? plain_line(l, more) : cli_input_line(&l->in, &l->line, more));
    if (l->line.len > 0 && l->line.p[l->line.len - 1] == '\r')
        l->line.p[--l->line.len] = 0;
    return NB_OK;
}

/* An odd number of backslashes at the end: an even number stands for itself. */
static bool ends_in_backslash(const char *text, size_t len)
{
    size_t n = 0;
    while (n < len && text[len - 1 - n] == '\\')
        n++;
    return n % 2 == 1;
}

struct assembly {
    struct nbi_str *message;
    bool started, block, whole;
};

/* Adds a line of a block, without the marks; true if more lines follow. */
static bool take_block_line(struct assembly *a, const char *text, size_t len, bool first)
{
    const size_t mark = strlen(BLOCK);
    bool last = len >= mark && memcmp(text + len - mark, BLOCK, mark) == 0;
    len -= last ? mark : 0;
    if (len == 0 && last && a->message->len > 0) /* the line end before the mark is not text */
        a->message->len--;
    nbi_str_append(a->message, text, len);
    if (!last && !(first && len == 0))
        nbi_str_puts(a->message, "\n");
    return !last;
}

/* Adds a line to the message; true if the next line belongs to it too. */
static bool take_line(struct assembly *a, const char *text, size_t len)
{
    const size_t mark = strlen(BLOCK);
    bool first = !a->started;
    a->started = true;
    if (first && memchr(text, '\n', len)) { /* pasted */
        a->whole = false;
        nbi_str_append(a->message, text, len);
        return false;
    }
    if (first && len >= mark && memcmp(text, BLOCK, mark) == 0) {
        a->block = true;
        a->whole = false;
        text += mark;
        len -= mark;
    }
    if (a->block)
        return take_block_line(a, text, len, first);
    bool on = ends_in_backslash(text, len);
    nbi_str_append(a->message, text, len - on);
    if (on) {
        nbi_str_puts(a->message, "\n");
        a->whole = false;
    }
    return on;
}

static bool is_blank(const struct nbi_str *s)
{
    for (size_t i = 0; i < s->len; i++)
        if (!s->p[i] || !strchr(" \t\r\n", s->p[i]))
            return false;
    return true;
}

static enum nb_status read_message(struct cli_lines *l, struct nbi_str *message, bool *whole,
                                   bool *more)
{
    struct assembly a = {.message = message, .whole = true};
    message->len = 0;
    for (bool goes_on = true; goes_on;) {
        NBI_TRY(next_line(l, a.started, more));
        if (!*more)
            return a.started && !l->terminal
                       ? nbi_fail(NB_EFORMAT, "standard input ends inside of a message")
                       : NB_OK;
        goes_on = take_line(&a, nbi_str_text(&l->line), l->line.len);
        NBI_TRY(nbi_str_status(message));
    }
    *whole = a.whole;
    return NB_OK;
}

enum nb_status cli_lines_next(struct cli_lines *l, struct nbi_str *message, bool *whole, bool *more)
{
    do {
        NBI_TRY(read_message(l, message, whole, more));
    } while (*more && is_blank(message));
    if (*more && l->terminal)
        cli_history_remember(&l->history, l->history_path, nbi_str_text(message));
    return NB_OK;
}
