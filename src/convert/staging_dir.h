/* staging_dir.h - a model directory that appears complete or not at all.
 *
 * Files are written to a temporary directory next to the target; commit moves it into the target's
 * place in one step. An existing target is replaced if it is empty or a model directory
 * (config.json, and no weights other than model*.safetensors); files in it that do not belong to
 * the model are kept. Anything else is refused at begin: other directories, the current directory,
 * mount points. */
#pragma once

#include "base/status.h"

/* Files of a model besides weights and config.json: tokenizer and generation settings.
 * NULL-terminated. */
extern const char *const nbi_model_sidecars[];

/* Whether a file of this name in a model directory belongs to the model. */
bool nbi_is_model_file(const char *name);

struct nbi_staging_dir {
    char *target, *temp; /* temp: where to write the files */
    int lock_fd;
};

enum nb_status nbi_staging_dir_begin(struct nbi_staging_dir *staging, const char *target);
enum nb_status nbi_staging_dir_commit(struct nbi_staging_dir *staging);

/* Does nothing after a failed begin or a commit. */
void nbi_staging_dir_abort(struct nbi_staging_dir *staging);
