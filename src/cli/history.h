/* history.h - lines typed before, kept in a file.
 *
 * $XDG_STATE_HOME/nibble/history (~/.local/state without it) has a line per entry, the oldest
 * first, with "\n" for a line end and "\\" for a backslash. A file that libedit wrote
 * ("_HiStOrY_V2_" and lines in vis(3)'s encoding) is read too. The file is read
 * again and then replaced as a whole, so that several chats may add to it. Failures of the file are
 * ignored: the lines of this process remain. */
#pragma once

#include "base/str.h"

/* Entries and bytes at most; the oldest go first. */
#define CLI_HISTORY_ENTRIES 1000
#define CLI_HISTORY_BYTES   ((size_t)16 << 20)

struct cli_history {
    char **entries; /* the oldest first */
    size_t count, bytes;
};

void cli_history_release(struct cli_history *h);

/* Adds an entry and removes an equal one. An empty entry, or one longer than CLI_HISTORY_BYTES, is
 * not added. */
enum nb_status cli_history_add(struct cli_history *h, const char *text);

/* The last entry before `from` that holds `part`; h->count: none. */
size_t cli_history_older(const struct cli_history *h, size_t from, const char *part, size_t len);

/* Adds the entries of a file with these bytes. */
enum nb_status cli_history_parse(struct cli_history *h, const char *bytes, size_t len);

/* The bytes of a file with these entries. */
void cli_history_print(const struct cli_history *h, struct nbi_str *out);

/* The path of the file, whose directories are created; NULL if it has none. The caller frees it. */
char *cli_history_find(void);

/* path may be NULL. */
void cli_history_load(struct cli_history *h, const char *path);

/* Adds an entry here and in the file. */
void cli_history_remember(struct cli_history *h, const char *path, const char *text);
