/* terminal.h - a terminal that hands out single keys while a line is edited: standard input and
 * output.
 *
 * Signals keep their meaning but for Ctrl-Z and Ctrl-\, which come as bytes: the terminal has to be
 * as it was before they stop or end the process (cli_terminal_signal). Nothing else is done by
 * handlers. */
#pragma once

#include <termios.h>

#include "base/str.h"

struct cli_terminal {
    struct termios before; /* what it is brought back to */
    bool raw;
    unsigned char buffer[4096];
    size_t at, len; /* what of the buffer is still to be used */
};

/* Hands out single keys, and brackets what is pasted; and back. Leaving ends the row that the
 * cursor is in. */
enum nb_status cli_terminal_enter(struct cli_terminal *t);
void cli_terminal_leave(struct cli_terminal *t);

/* *changed: somebody has changed the mode meanwhile (as a shell does while we are stopped), and it
 * was set again. */
enum nb_status cli_terminal_check(struct cli_terminal *t, bool *changed);

/* 0 where the size is not known. */
void cli_terminal_size(size_t *columns, size_t *rows);

/* Writes all of it, and empties it. */
enum nb_status cli_terminal_write(struct nbi_str *out);

enum cli_terminal_input {
    CLI_TERMINAL_BYTES, /* the buffer has some */
    CLI_TERMINAL_PAUSE, /* nothing came for a tenth of a second */
    CLI_TERMINAL_END
};

/* Waits for something to be in the buffer. NB_EINTERRUPTED as soon as somebody wants to stop. */
enum nb_status cli_terminal_wait(struct cli_terminal *t, enum cli_terminal_input *input);

/* Gives the terminal back, sends the signal to the process group as the terminal would have done,
 * and takes it again when that returns. */
enum nb_status cli_terminal_signal(struct cli_terminal *t, int signal);
