/* display.h - draws a prompt and the text being edited on a terminal.
 *
 * in : prompt, text, cursor, the size of the window
 * out: bytes for the terminal
 *
 * Rows wrap at the width of the window. Of a text with more rows than the window, those around the
 * cursor are shown. No array here has the size of the window, so a resize invalidates nothing: the
 * next draw starts from scratch.
 *
 * A terminal needs CR, LF and the sequences CUU, CUF, CUP, ED and DECAWM's pending wrap or none. */
#pragma once

#include "base/str.h"

struct cli_display {
    size_t columns, rows; /* of the window; at least 1 */
    size_t top;           /* the first row of the text that is shown */
    size_t cursor_row;    /* rows of the window above the cursor that we have drawn */
};

/* What is drawn: the prompt, then the text. Both are well-formed UTF-8. */
struct cli_shown {
    const char *prompt, *text;
    size_t len, cursor; /* of text, in bytes */
};

/* Sets the size as reported by the system; unknown (0) counts as 24 rows of 80 columns. */
void cli_display_resize(struct cli_display *d, size_t columns, size_t rows);

/* Begins a line at the terminal's cursor, which must be at the start of a row. */
void cli_display_begin(struct cli_display *d);

/* Appends the bytes that turn the last drawing into this one. */
void cli_display_draw(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out);

/* Clears the screen first, then draws. */
void cli_display_clear(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out);

/* Removes what is drawn and leaves the cursor where it began. */
void cli_display_erase(struct cli_display *d, struct nbi_str *out);

/* Moves the cursor to the last row, so that the next line end goes below the text. whole: all rows
 * are drawn first, even those that do not fit the window. */
void cli_display_leave(struct cli_display *d, const struct cli_shown *s, bool whole,
                       struct nbi_str *out);
