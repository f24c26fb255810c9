/* dirs.h - directories: listing, removing, syncing, and temporary names for atomic writes. */
#pragma once

#include <dirent.h>

#include "base/status.h"

/* Creates ".BASE.nibble-PID-N" next to target, as a file or a directory, and locks it for as long
 * as *fd is open. First removes the leftovers of dead writers, which are the entries that nobody
 * has locked. The caller frees *temp. */
enum nb_status nbi_temp_create(const char *target, bool directory, char **temp, int *fd);

/* Renames temp to target (flags: 0 or RENAME_EXCHANGE) and syncs their directory. A directory that
 * is itself temporary is not synced here but as a whole, before it gets its final name. *done: the
 * rename has happened; a failure after that says in its message that target is in place. */
enum nb_status nbi_replace(const char *temp, const char *target, unsigned flags, bool *done);

/* Removes entries of dir that begin with prefix, are temporary (contain ".nibble-") and belong to
 * writers that died. */
void nbi_temp_clean(const char *dir, const char *prefix);

/* Removes the temporary entries that dead writers left for target. */
enum nb_status nbi_temp_clean_for(const char *target);

/* Creates dir unless it exists. Its parent must exist. */
enum nb_status nbi_dir_make(const char *dir);

/* Removes a file, or a directory with its contents. Does not follow symbolic links. */
void nbi_remove_tree(const char *path);

/* Returns the next name other than "." and ".."; NULL at the end or on an error. errno is 0 at the
 * end. */
const char *nbi_dir_next(DIR *dir);

bool nbi_dir_is_empty(const char *path); /* false if it cannot be read */
