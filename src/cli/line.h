/* line.h - reads what the user types: messages of one or several lines, with editing and history on
 * a terminal.
 *
 * A line that ends in a backslash continues in the next one; """ begins and ends a block of lines.
 * Several lines pasted into a terminal are one message, whatever they contain. */
#pragma once

#include "base/str.h"

struct cli_lines;

/* terminal: standard input and output are a terminal; otherwise plain lines are read. */
enum nb_status cli_lines_open(struct cli_lines **out, bool terminal);
void cli_lines_close(struct cli_lines *l); /* NULL is fine */

/* The next message; blank ones are skipped. *whole: it is a single line as typed, which may be a
 * command. *more false: the input has ended. NB_EINTERRUPTED: what was typed is dropped. */
enum nb_status cli_lines_next(struct cli_lines *l, struct nbi_str *message, bool *whole,
                              bool *more);
