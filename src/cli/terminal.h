/* terminal.h - standard input and output as a terminal in raw mode, while a line is edited.
 *
 * Signals keep their meaning except Ctrl-Z and Ctrl-\, which arrive as bytes: the terminal's mode
 * has to be restored before they stop or end the process (cli_terminal_signal). */
#pragma once

#include <termios.h>

#include "base/str.h"

struct cli_terminal {
    struct termios before; /* the mode to restore */
    bool raw;
    unsigned char buffer[4096];
    size_t at, len; /* unread bytes of the buffer: [at, len) */
};

/* Enters and leaves raw mode with bracketed paste. end_row: the cursor goes to the next row. */
enum nb_status cli_terminal_enter(struct cli_terminal *t);
void cli_terminal_leave(struct cli_terminal *t, bool end_row);

/* Whether TERM promises nothing but printing. */
bool cli_terminal_is_dumb(void);

/* While text is printed that Ctrl-C may end: keys do not show in it, and are there for the next
 * line that is edited. False: nothing was changed, so there is nothing to end. */
bool cli_terminal_begin_output(struct termios *before);
void cli_terminal_end_output(const struct termios *before);

/* Forgets what was typed and not read. */
void cli_terminal_forget_keys(void);

/* Sets the mode again if another process changed it (as a shell does while we are stopped), and
 * says so in *changed. */
enum nb_status cli_terminal_check(struct cli_terminal *t, bool *changed);

/* The size of the terminal that fd is; 0: it is none, or the size is unknown. */
void cli_terminal_size(int fd, size_t *columns, size_t *rows);

/* Writes all of out and empties it. */
enum nb_status cli_terminal_write(struct nbi_str *out);

enum cli_terminal_input {
    CLI_TERMINAL_BYTES, /* the buffer has some */
    CLI_TERMINAL_PAUSE, /* nothing came for a tenth of a second */
    CLI_TERMINAL_END
};

/* Waits for input in the buffer. NB_EINTERRUPTED after a signal. */
enum nb_status cli_terminal_wait(struct cli_terminal *t, enum cli_terminal_input *input);

/* Leaves raw mode, sends the signal to the process group as the terminal would have done, and
 * enters raw mode again when the process continues. */
enum nb_status cli_terminal_signal(struct cli_terminal *t, int signal);
