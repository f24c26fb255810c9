/* two_columns.h - two answers to a question, in two columns. */
#pragma once

#include "nibble/eval.h"

/* Columns of the terminal, or 100 if there is none. */
int cli_terminal_width(void);

/* The question and both answers, wrapped at spaces and between Chinese, Japanese and Korean
 * characters; control characters as '?', line ends as spaces. Long texts are cut. */
void cli_print_beside(const struct nb_ab_row *row, int width);

/* The heading of the columns; of long names, the end is shown. */
void cli_print_beside_names(const char *left, const char *right, int width);
