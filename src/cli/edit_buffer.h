/* edit_buffer.h - the text of a line being edited, its cursor, and the text cut last.
 *
 * The text is always well-formed UTF-8 without control characters other than '\n' and '\t', and the
 * cursor is always between two graphemes (what a reader takes for one character). A function that
 * fails leaves the text as it was. */
#pragma once

#include "base/str.h"

/* Bytes of a text at most. */
#define CLI_EDIT_MAX ((size_t)4 << 20)

struct cli_edit {
    char *text; /* not NUL-terminated; NULL while nothing was ever inserted */
    size_t len, cap;
    size_t cursor; /* bytes before it */
    char *cut;     /* what yanking inserts */
    size_t cut_len;
    bool cutting; /* the last change was a cut, so that the next one adds to it */
};

/* Targets of moves and cuts. */
enum cli_edit_place {
    CLI_EDIT_LEFT, /* a grapheme */
    CLI_EDIT_RIGHT,
    CLI_EDIT_WORD_LEFT, /* to the start of a word of letters and digits */
    CLI_EDIT_WORD_RIGHT,
    CLI_EDIT_BLANK_LEFT, /* to the start of a word between blanks */
    CLI_EDIT_START,      /* of the text */
    CLI_EDIT_END
};

void cli_edit_release(struct cli_edit *e);

/* Empties the text; what was cut stays. */
void cli_edit_clear(struct cli_edit *e);

/* Inserts bytes before the cursor, without malformed UTF-8 and control characters; '\r' and "\r\n"
 * become '\n'. *fits false: the text would exceed CLI_EDIT_MAX, and is unchanged. */
enum nb_status cli_edit_insert(struct cli_edit *e, const char *bytes, size_t len, bool *fits);

/* Replaces the text; the cursor is at its end. */
enum nb_status cli_edit_set(struct cli_edit *e, const char *bytes, size_t len);

void cli_edit_move(struct cli_edit *e, enum cli_edit_place to);

/* Deletes from the cursor to the target. */
void cli_edit_delete(struct cli_edit *e, enum cli_edit_place to);

/* Deletes and keeps the text for yanking. Consecutive cuts are yanked together. */
enum nb_status cli_edit_cut(struct cli_edit *e, enum cli_edit_place to);
enum nb_status cli_edit_yank(struct cli_edit *e, bool *fits);

/* Swaps the graphemes on both sides of the cursor, at the end of the text the last two, and moves
 * on. */
enum nb_status cli_edit_transpose(struct cli_edit *e);
