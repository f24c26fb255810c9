/* line.h - what somebody types: messages of one line or of several, with editing and history on a
 * terminal.
 *
 * A line that ends in a backslash goes on in the next one; """ begins and ends a block of lines. A
 * text of several lines that is pasted into a terminal is one message, whatever is in it. */
#pragma once

#include "base/str.h"

struct cli_lines;

/* terminal: standard input and output are one; else plain lines of standard input. */
enum nb_status cli_lines_open(struct cli_lines **out, bool terminal);
void cli_lines_close(struct cli_lines *l); /* NULL is fine */

/* The next message; blank ones are passed over. *whole: it is one line as it was typed, which may
 * be a command. *more false: the input has ended. NB_EINTERRUPTED: nothing of it is kept. */
enum nb_status cli_lines_next(struct cli_lines *l, struct nbi_str *message, bool *whole,
                              bool *more);
