/* line_editor.h - edits a line: turns keys into changes of a text and the text into terminal bytes.
 * It does no input or output itself.
 *
 * in : the bytes typed, the size of the window
 * out: bytes for the terminal (`out`, which the caller writes and empties), and the text
 *
 * The keys are those of readline's emacs mode. Drawing waits for cli_editor_refresh, so that a
 * burst of keys is drawn once. */
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
    bool stale, clear; /* the line needs drawing; the screen needs clearing first */

    const struct cli_history *history;
    size_t entry;         /* the entry shown; history->count: none */
    struct nbi_str typed; /* the line typed before the first entry was shown */

    bool searching, missed; /* missed: no entry contains the pattern */
    struct nbi_str pattern, search_prompt, before_search;
    size_t cursor_before_search, entry_before_search;
};

void cli_editor_release(struct cli_editor *e);

/* An empty line. prompt and history are borrowed until the line is left. */
void cli_editor_begin(struct cli_editor *e, const char *prompt, const struct cli_history *history);

/* Processes a byte. After a failure (no memory) the line is unchanged, or empty. */
enum nb_status cli_editor_feed(struct cli_editor *e, unsigned char byte,
                               enum cli_editor_event *event);

/* No byte came for a while. */
enum nb_status cli_editor_pause(struct cli_editor *e);

/* The size of the window as the system says it. */
void cli_editor_resize(struct cli_editor *e, size_t columns, size_t rows);

/* Draws the line if it is out of date. cli_editor_draw_anew: the terminal was used for something
 * else, so draw all of it, at the cursor. */
enum nb_status cli_editor_refresh(struct cli_editor *e);
void cli_editor_draw_anew(struct cli_editor *e);

/* Moves the cursor to the last row, so that the next line end goes below the text. whole: the whole
 * text stays on the screen. */
enum nb_status cli_editor_leave(struct cli_editor *e, bool whole);

/* Removes the line from the screen instead. */
enum nb_status cli_editor_erase(struct cli_editor *e);
