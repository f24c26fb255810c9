/* staging_dir.c - stages model directories and exchanges them with existing ones. */
#include "convert/staging_dir.h"

#include <string.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/str.h"
#include "base/syscall.h"
#include "formats/store.h"

const char *const nbi_model_sidecars[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    NULL,
};

/* These files are replaced by a new model; all others in the directory are kept. */
bool nbi_is_model_file(const char *name)
{
    for (const char *const *p = nbi_model_sidecars; *p; p++)
        if (strcmp(name, *p) == 0)
            return true;
    enum nbi_format format;
    return (nbi_starts_with(name, "model") && nbi_format_of_file(name, &format) &&
            format == NBI_FORMAT_SAFETENSORS) ||
           strcmp(name, NBI_SHARD_INDEX) == 0 || strcmp(name, "config.json") == 0 ||
           strcmp(name, "hf_quant_config.json") == 0;
}

static enum nb_status listing_failed(const char *dir)
{
    return nbi_fail(NB_EIO, "cannot read directory '%s': %s", dir, strerror(errno));
}

static enum nb_status check_content(const char *target)
{
    DIR *dir = nbi_sys_opendir(target);
    if (!dir)
        return listing_failed(target);
    int files = 0;
    bool config = false;
    char foreign[256] = "";
    const char *name;
    while ((name = nbi_dir_next(dir))) {
        files++;
        config = config || strcmp(name, "config.json") == 0;
        char *path = nbi_path_join(target, name);
        bool subdirectory = path && nbi_path_is_dir(path);
        free(path);
        enum nbi_format format;
        if (subdirectory || (!nbi_is_model_file(name) && nbi_format_of_file(name, &format)))
            snprintf(foreign, sizeof foreign, "%s", name);
    }
    enum nb_status rc = errno ? listing_failed(target) : NB_OK;
    closedir(dir);
    NBI_TRY(rc);
    if (files && !config)
        return nbi_fail(NB_EIO,
                        "will not write a model into '%s': it is not empty and not a model "
                        "directory; choose a new name",
                        target);
    if (foreign[0])
        return nbi_fail(NB_EIO,
                        "will not replace the model in '%s': it also holds '%s'; choose a "
                        "new name",
                        target, foreign);
    return NB_OK;
}

/* Refuses at begin what would otherwise fail at commit, or destroy something unexpectedly. */
static enum nb_status check_replaceable(const char *target)
{
    struct stat own, above;
    char *real = realpath(target, NULL), *parent = real ? nbi_path_dir(real) : NULL;
    bool mount = !parent || stat(real, &own) != 0 || stat(parent, &above) != 0 ||
                 own.st_dev != above.st_dev || own.st_ino == above.st_ino;
    free(parent);
    free(real);
    if (mount)
        return nbi_fail(NB_EIO,
                        "cannot replace '%s' in one step: it is a mount point; name a directory "
                        "inside it",
                        target);
    if (nbi_path_same(target, "."))
        return nbi_fail(NB_EIO, "will not replace '%s', the current directory; name one inside it",
                        target);
    return check_content(target);
}

enum nb_status nbi_staging_dir_begin(struct nbi_staging_dir *staging, const char *target)
{
    *staging = (struct nbi_staging_dir){.lock_fd = -1};
    struct stat st;
    if (nbi_path_dangles(target))
        return nbi_fail(NB_EIO, "cannot write '%s': a link to nothing", target);
    if (stat(target, &st) == 0) {
        if (!S_ISDIR(st.st_mode))
            return nbi_fail(NB_EIO, "cannot write directory '%s': a file has that name", target);
        NBI_TRY(check_replaceable(target));
        staging->target = realpath(target, NULL);
    } else {
        staging->target = strdup(target);
    }
    if (!staging->target)
        return nbi_fail_memory("path", strlen(target));
    size_t n = strlen(staging->target);
    while (n > 1 && staging->target[n - 1] == '/')
        staging->target[--n] = 0;
    enum nb_status rc = nbi_temp_create(staging->target, true, &staging->temp, &staging->lock_fd);
    if (rc != NB_OK)
        nbi_staging_dir_abort(staging);
    return rc;
}

void nbi_staging_dir_abort(struct nbi_staging_dir *staging)
{
    if (staging->temp) {
        nbi_remove_tree(staging->temp);
        close(staging->lock_fd);
    }
    free(staging->temp);
    free(staging->target);
    *staging = (struct nbi_staging_dir){.lock_fd = -1};
}

/* Links files that do not belong to the model into the new directory before the exchange, so that
 * the user's files never exist only under a temporary name. */
static enum nb_status carry_over(const char *from, const char *to)
{
    DIR *dir = nbi_sys_opendir(from);
    if (!dir)
        return listing_failed(from);
    const char *name;
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && (name = nbi_dir_next(dir))) {
        if (nbi_is_model_file(name))
            continue;
        char *old = nbi_path_join(from, name), *new = nbi_path_join(to, name);
        if (!old || !new)
            rc = NB_ENOMEM;
        else if (nbi_sys_link(old, new) != 0 && errno != EEXIST)
            rc =
                nbi_fail(NB_EIO, "cannot keep '%s' beside the new model: %s", old, strerror(errno));
        free(old);
        free(new);
    }
    if (rc == NB_OK && errno)
        rc = listing_failed(from);
    closedir(dir);
    return rc;
}

enum nb_status nbi_staging_dir_commit(struct nbi_staging_dir *staging)
{
    bool exchange = nbi_path_exists(staging->target) && !nbi_dir_is_empty(staging->target);
    bool done = false;
    enum nb_status rc = NB_OK;
    if (nbi_sys_fsync(staging->lock_fd) != 0)
        rc = nbi_fail(NB_EIO, "cannot sync directory '%s': %s", staging->temp, strerror(errno));
    else if (exchange)
        rc = carry_over(staging->target, staging->temp);
    if (rc == NB_OK)
        rc = nbi_replace(staging->temp, staging->target, exchange ? RENAME_EXCHANGE : 0, &done);
    if (done && !exchange) { /* the name is free now, and may be reused by others */
        close(staging->lock_fd);
        free(staging->temp);
        staging->temp = NULL;
    }
    nbi_staging_dir_abort(staging); /* after an exchange, temp is the old model */
    return rc;
}
