/* beside.h - two answers to a question, in columns beside each other. */
#pragma once

#include <stddef.h>

struct cli_beside {
    const char *question;
    const char *text[2];
    size_t len[2];
};

/* Columns of the terminal, or 100 if there is none. */
int cli_terminal_width(void);

/* Wrapped at spaces and between Chinese, Japanese and Korean characters; control characters as '?',
 * line ends as spaces. Of a long text only the beginning. */
void cli_print_beside(const struct cli_beside *b, int width);

/* The line above them. */
void cli_print_beside_names(const char *left, const char *right, int width);
