/* status_line.c - the last line of stderr on a terminal, which is redrawn in place.
 *
 * The width is asked for at each draw, so that the line follows a window that changes. */
#include "cli/status_line.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/terminal.h"

#define WIDEST   400
#define UNKNOWN  80 /* columns of a terminal that does not say */
#define GAP      "  "
#define RESERVED 3 /* columns: the "^C" that a terminal echoes must not begin a row */

#define ERASE "\r\033[K" /* the row of the cursor, with a "^C" that the terminal has echoed */

/* NONE: never drawn. Otherwise the cursor is in the row of the line, or at the start of one. */
enum { NONE, CLEARED, DRAWN };
static volatile sig_atomic_t state;

/* ---- the text ---- */

const char *cli_bar(char bar[CLI_BAR + 3], double share)
{
    int full = (int)(share * CLI_BAR);
    for (int i = 0; i < CLI_BAR; i++)
        bar[i + 1] = i < full ? '#' : '.';
    bar[0] = '[';
    bar[CLI_BAR + 1] = ']';
    bar[CLI_BAR + 2] = 0;
    return bar;
}

/* The columns of the parts of up to this rank. */
static size_t width_of(const struct cli_status_part *parts, size_t count, int rank)
{
    size_t width = 0;
    for (size_t i = 0; i < count; i++)
        if (*parts[i].text && parts[i].rank <= rank)
            width += strlen(parts[i].text) + (width > 0 ? strlen(GAP) : 0);
    return width;
}

void cli_status_join(char *out, size_t size, const struct cli_status_part *parts, size_t count,
                     size_t columns)
{
    int rank = 0;
    size_t len = 0, limit = columns < size - 1 ? columns : size - 1;
    for (size_t i = 0; i < count; i++)
        rank = parts[i].rank > rank ? parts[i].rank : rank;
    while (rank > 0 && width_of(parts, count, rank) > limit)
        rank--;
    out[0] = 0;
    for (size_t i = 0; i < count && len < limit; i++)
        if (*parts[i].text && parts[i].rank <= rank) {
            snprintf(out + len, limit + 1 - len, "%s%s", len > 0 ? GAP : "", parts[i].text);
            len += strlen(out + len);
        }
}

/* ---- the terminal ---- */

bool cli_status_line_works(void)
{
    return isatty(STDERR_FILENO) && !cli_terminal_is_dumb();
}

void cli_status_line_draw(const struct cli_status_part *parts, size_t count)
{
    char text[WIDEST + 1];
    size_t columns, rows;
    cli_terminal_size(STDERR_FILENO, &columns, &rows);
    columns = columns > 0 ? columns : UNKNOWN;
    cli_status_join(text, sizeof text, parts, count, columns > RESERVED ? columns - RESERVED : 1);
    fprintf(stderr, ERASE "%s", text);
    state = DRAWN;
}

static void leave(const char *end)
{
    if (state != DRAWN)
        return;
    fputs(end, stderr);
    state = CLEARED;
}

void cli_status_line_clear(void)
{
    leave(ERASE);
}

void cli_status_line_keep(void)
{
    leave("\n");
}

void cli_status_line_interrupt(const char *message)
{
    ssize_t told = state == NONE ? 0 : write(STDERR_FILENO, ERASE, strlen(ERASE));
    state = state == NONE ? NONE : CLEARED;
    told = told < 0 ? told : write(STDERR_FILENO, message, strlen(message));
    (void)told; /* there may be nobody to tell */
}
