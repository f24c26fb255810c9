/* staging_dir.h - a model directory that appears whole.
 *
 * Files are made in a temporary directory beside the target; commit puts it in the target's place
 * in one step. A target that exists is replaced if it is empty or a model directory (config.json,
 * and no weights but model*.safetensors); files in it that belong to no model are kept. Anything
 * else is refused at begin: other directories, the current one, mount points. */
#pragma once

#include "base/status.h"

/* Files of a model besides weights and config.json: tokenizer, generation settings; ends in NULL.
 */
extern const char *const nbi_model_sidecars[];

/* Whether a file of this name in the directory of a model is part of it. */
bool nbi_is_model_file(const char *name);

struct nbi_staging_dir {
    char *target, *temp; /* temp: where to put the files */
    int lock_fd;
};

enum nb_status nbi_staging_dir_begin(struct nbi_staging_dir *stage, const char *target);
enum nb_status nbi_staging_dir_commit(struct nbi_staging_dir *stage);
void nbi_staging_dir_abort(
    struct nbi_staging_dir *stage); /* after a failed begin or a commit: does nothing */
