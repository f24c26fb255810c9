/* wrap.h - text on a terminal as it comes, wrapped between words.
 *
 * in : pieces of text, in whole characters
 * out: a stream
 *
 * A word is held back until it is complete or does not fit into a row any more. Words that are
 * wider than a row begin on a row of their own, and the terminal wraps them. Rows also break
 * before and after characters of two columns: Chinese, Japanese, Korean. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#define CLI_WRAP_WORD 2048 /* bytes of a word that is held back */

struct cli_wrap {
    FILE *out;
    size_t columns; /* of the terminal */
    size_t column;  /* of the cursor; equal to columns in a full row */
    size_t blanks;  /* before the word; not printed where the row ends */
    char word[CLI_WRAP_WORD];
    size_t len, width; /* of the word, in bytes and columns */
    bool whole;        /* the word is a character of two columns */
    bool splits;       /* the word is wider than a row, and its beginning is printed */
};

/* Begins at the start of a row. */
void cli_wrap_begin(struct cli_wrap *w, FILE *out);

/* The columns of the terminal, before each piece, since they may change; 0: unknown, no wrapping.
 */
void cli_wrap_resize(struct cli_wrap *w, size_t columns);

/* Control characters and malformed bytes become '?'. */
void cli_wrap_text(struct cli_wrap *w, const char *text, size_t len);

/* A sequence that takes no columns. */
void cli_wrap_sequence(struct cli_wrap *w, const char *sequence);

/* Prints what is held back. */
void cli_wrap_end(struct cli_wrap *w);
