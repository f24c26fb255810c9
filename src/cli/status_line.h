/* status_line.h - the last line of stderr on a terminal, which is redrawn in place.
 *
 * It takes one row, however narrow the terminal is. Whatever else is printed while it may be shown
 * comes after cli_status_line_clear. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* A piece of the line. Where not all fit, those of the highest rank are left out first. */
struct cli_status_part {
    const char *text; /* ASCII; empty: nothing */
    int rank;
};

/* Joins as many parts as fit into that many columns; a single part that is wider is cut. */
void cli_status_join(char *out, size_t size, const struct cli_status_part *parts, size_t count,
                     size_t columns);

/* Whether stderr is a terminal that can do this; otherwise only plain lines are to be printed. */
bool cli_status_line_works(void);

/* Shows a line in place of the one before. */
void cli_status_line_draw(const struct cli_status_part *parts, size_t count);

void cli_status_line_clear(void); /* removes it */
void cli_status_line_keep(void);  /* makes it an ordinary line */

/* Prints a message in place of the line; for signal handlers. */
void cli_status_line_interrupt(const char *message);

#define CLI_BAR 20 /* columns of a bar, without its brackets */

/* "[#####...............]" */
const char *cli_bar(char bar[CLI_BAR + 3], double share);
