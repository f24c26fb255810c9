/* line_editor.h - edits a line: keys change a text, and bytes show it. It reads and writes nothing.
 *
 * in : the bytes that somebody types, the size of the window
 * out: bytes for the terminal (`out`, which the caller writes and empties), and the text
 *
 * The keys are those of readline's emacs mode. Nothing is drawn before cli_editor_refresh, so that
 * many keys at once are drawn once. */
#pragma once

#include "cli/display.h"
#include "cli/edit_buffer.h"
#include "cli/history.h"
#include "cli/keys.h"

enum cli_editor_event {
    CLI_EDITOR_GOES_ON,
    CLI_EDITOR_ACCEPTED, /* the line is edit.text */
    CLI_EDITOR_ENDED,    /* Ctrl-D on an empty line */
    CLI_EDITOR_SUSPEND,  /* Ctrl-Z */
    CLI_EDITOR_QUIT      /* Ctrl-\ */
};

struct cli_editor {
    struct cli_edit edit;
    struct cli_keys keys;
    struct cli_display display;
    struct nbi_str out;
    const char *prompt;
    bool stale, clear; /* the screen is to be drawn; to be cleared before that */

    const struct cli_history *history;
    size_t entry;         /* the entry that is edited; history->count: none */
    struct nbi_str typed; /* the line that was typed before the first entry was shown */

    bool searching, missed; /* missed: nothing holds the pattern */
    struct nbi_str pattern, search_prompt, before_search;
    size_t cursor_before_search, entry_before_search;
};

void cli_editor_release(struct cli_editor *e);

/* An empty line. prompt and history are borrowed until the line is left. */
void cli_editor_begin(struct cli_editor *e, const char *prompt, const struct cli_history *history);

/* Takes a byte. On a failure (no memory) the line is as it was before, or empty. */
enum nb_status cli_editor_feed(struct cli_editor *e, unsigned char byte,
                               enum cli_editor_event *event);

/* No byte came for a while. */
enum nb_status cli_editor_pause(struct cli_editor *e);

/* The size of the window as the system says it. */
void cli_editor_resize(struct cli_editor *e, size_t columns, size_t rows);

/* Draws the line if it is not on the screen as it is; `anew` where the terminal was used for other
 * things, at the cursor. */
enum nb_status cli_editor_refresh(struct cli_editor *e);
void cli_editor_draw_anew(struct cli_editor *e);

/* Puts the cursor into the last row, so that a line end goes below the text. whole: all of it is to
 * stay on the screen. */
enum nb_status cli_editor_leave(struct cli_editor *e, bool whole);
