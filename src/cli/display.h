/* display.h - how a prompt and a text that is being edited look on a terminal.
 *
 * in : prompt, text, cursor, the size of the window
 * out: bytes for the terminal
 *
 * Rows end where the window ends, as terminals have it; a text with more rows than the window shows
 * those around its cursor. Nothing here has the size of the window, so a window that changes
 * invalidates nothing: what is drawn next is drawn from scratch.
 *
 * A terminal needs CR, LF and the sequences CUU, CUF, CUP, ED and DECAWM's pending wrap or none. */
#pragma once

#include "base/str.h"

struct cli_display {
    size_t columns, rows; /* of the window; at least 1 */
    size_t top;           /* the first row of the text that is shown */
    size_t cursor_row;    /* rows of the window above the cursor that we have drawn */
};

/* What is shown: the text follows the prompt. Both are well-formed UTF-8. */
struct cli_shown {
    const char *prompt, *text;
    size_t len, cursor; /* of text, in bytes */
};

/* Takes a size as the system says it; what it does not know (0) is 24 rows of 80 columns. */
void cli_display_resize(struct cli_display *d, size_t columns, size_t rows);

/* For a line that begins where the terminal's cursor is, at the start of a row. */
void cli_display_begin(struct cli_display *d);

/* Appends what brings the terminal from what was drawn last to this. */
void cli_display_draw(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out);

/* The same after the screen was cleared, which it does. */
void cli_display_clear(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out);

/* Leaves what is drawn, with the cursor in its last row, so that a line end goes below it. whole:
 * all rows are shown, even those for which the window has no room. */
void cli_display_leave(struct cli_display *d, const struct cli_shown *s, bool whole,
                       struct nbi_str *out);
