/* predecessor.h - options of the predecessor's scripts, which work here too.
 *
 * docs/FROM-THE-PREDECESSOR.md lists them for people; help, man pages and completions do not. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum cli_former_use {
    CLI_FORMER_OPTION,   /* is our option `ours` */
    CLI_FORMER_ARGUMENT, /* its value is the next argument */
    CLI_FORMER_ACCEPTED, /* asks for what is done anyway */
    CLI_FORMER_REFUSED
};

struct cli_former {
    const char *commands; /* "generate|chat" */
    const char *names;    /* without dashes, "topp|top_p" */
    const char *values;   /* "float32=f32|none": theirs, and ours if it differs; NULL: any */
    enum cli_former_use use;
    const char *ours;
    const char *say; /* why it is refused and what to use; else a note, or NULL */
};

/* Whether the table has a row for the option, whatever its value. */
bool cli_former_has(const char *command, const char *name, size_t len);

/* The row for the option with that value; NULL: none. mapped: what the value is here, in `buffer`
 * if it is another. */
const struct cli_former *cli_former_find(const char *command, const char *name, size_t len,
                                         const char *value, const char **mapped, char buffer[32]);

/* Whether the word stands for --, as "script" did for the predecessor's guard. */
bool cli_former_ends_options(const char *command, const char *word);
