/* pages.h - what is made from the table of commands for others to read: docs/cli, man pages, and
 * completions for shells. */
#pragma once

#include "nibble/core.h"

/* A page of docs/cli for each command. */
enum nb_status cli_write_docs(const char *dir);

/* nibble.1, and nibble-COMMAND.1 for each command. */
enum nb_status cli_write_man(const char *dir);

/* nibble.bash, _nibble (zsh) and nibble.fish: commands, what some of them do (WHAT), options and
 * their values. */
enum nb_status cli_write_completions(const char *dir);
