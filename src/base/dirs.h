/* dirs.h - directories: listing, removing, syncing, and the temporary names of atomic writing. */
#pragma once

#include <dirent.h>

#include "base/status.h"

/* Creates ".BASE.nibble-PID-N" beside target, a file or a directory, and takes a lock on it that
 * lasts as long as *fd is open. Entries of writers that died (nobody holds their lock) are removed
 * first. The caller frees *temp. */
enum nb_status nbi_temp_create(const char *target, bool directory, char **temp, int *fd);

/* Renames temp onto target (flags: 0, or RENAME_EXCHANGE) and syncs their directory, unless that is
 * itself a temporary one, which is synced as a whole before it gets its name. *done: the rename has
 * happened, and a failure after it says in its message that target is in place. */
enum nb_status nbi_replace(const char *temp, const char *target, unsigned flags, bool *done);

/* Removes names in dir that begin with prefix, are temporary ones (".nibble-" is in them) and
 * belong to writers that died. */
void nbi_temp_clean(const char *dir, const char *prefix);

/* The same for the temporary entries of a target. */
enum nb_status nbi_temp_clean_for(const char *target);

/* Makes the directory if it is not there, and only its last name is missing. */
enum nb_status nbi_dir_make(const char *dir);

/* Removes a file, or a directory and all in it; symbolic links are removed, not followed. */
void nbi_remove_tree(const char *path);

/* The next name in a directory but "." and ".."; NULL at the end or on an error, which errno then
 * tells from the end (0). */
const char *nbi_dir_next(DIR *dir);

bool nbi_dir_is_empty(const char *path); /* false also where it cannot be read */
