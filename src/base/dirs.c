/* dirs.c - temporary names, stale ones removed; directories replaced in one step; paths. */
#include "base/dirs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/str.h"

/* ---- paths ---- */

bool nbi_path_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool nbi_path_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool nbi_path_is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool nbi_path_dangles(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && stat(path, &st) != 0;
}

bool nbi_path_same(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

char *nbi_path_join(const char *dir, const char *name)
{
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        n--;
    size_t size = n + strlen(name) + 2;
    char *path = malloc(size);
    if (!path) {
        nbi_fail_memory("path", size);
        return NULL;
    }
    snprintf(path, size, "%.*s%s%s", (int)n, dir, n == 1 && dir[0] == '/' ? "" : "/", name);
    return path;
}

const char *nbi_path_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

char *nbi_path_dir(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *dir = !slash          ? strdup(".")
                : slash == path ? strdup("/")
                                : strndup(path, (size_t)(slash - path));
    if (!dir)
        nbi_fail_memory("path", strlen(path));
    return dir;
}

/* ---- temporary names ---- */

void nbi_remove_tree(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        char *child = nbi_path_join(path, e->d_name);
        struct stat st;
        if (child && lstat(child, &st) == 0 && S_ISDIR(st.st_mode))
            nbi_remove_tree(child);
        else if (child)
            unlink(child);
        free(child);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

/* Removes what dead writers of this target left: same prefix, and nobody holds the lock. */
static void remove_stale(const char *dir, const char *prefix)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    while (d && (e = readdir(d))) {
        if (!nbi_starts_with(e->d_name, prefix))
            continue;
        char *path = nbi_path_join(dir, e->d_name);
        int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW) : -1;
        if (fd >= 0) {
            if (flock(fd, LOCK_EX | LOCK_NB) == 0)
                nbi_remove_tree(path), unlink(path);
            close(fd);
        }
        free(path);
    }
    if (d)
        closedir(d);
}

/* False with errno set if it cannot be. */
static bool create_one(const char *path, bool directory, int *fd)
{
    if (directory && mkdir(path, 0777) != 0)
        return false;
    *fd = directory ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                    : open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (*fd < 0) {
        int reason = errno;
        if (directory)
            rmdir(path);
        errno = reason;
        return false;
    }
    flock(*fd, LOCK_EX | LOCK_NB); /* only so that others can tell we live */
    return true;
}

enum nb_status nbi_temp_create(const char *target, bool directory, char **temp, int *fd)
{
    *temp = NULL;
    *fd = -1;
    char *dir = nbi_path_dir(target);
    if (!dir)
        return NB_ENOMEM;
    char prefix[240], name[280];
    snprintf(prefix, sizeof prefix, ".%.200s.nibble-", nbi_path_base(target));
    remove_stale(dir, prefix);
    enum nb_status rc = NB_EIO;
    bool made = false;
    for (int attempt = 0; attempt < 100 && !made; attempt++) {
        snprintf(name, sizeof name, "%s%ld-%d", prefix, (long)getpid(), attempt);
        free(*temp);
        *temp = nbi_path_join(dir, name);
        if (!*temp)
            break;
        made = create_one(*temp, directory, fd);
        if (!made && errno != EEXIST)
            break;
    }
    if (made)
        rc = NB_OK;
    else if (*temp)
        rc = nbi_fail(NB_EIO, "cannot write '%s': cannot create a file in '%s': %s", target, dir,
                      strerror(errno));
    else
        rc = NB_ENOMEM;
    free(dir);
    if (rc != NB_OK) {
        free(*temp);
        *temp = NULL;
    }
    return rc;
}

enum nb_status nbi_sync_parent(const char *path)
{
    char *dir = nbi_path_dir(path);
    if (!dir)
        return NB_ENOMEM;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some file systems cannot sync a directory and say EINVAL; there is nothing more to do. */
    bool failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL);
    enum nb_status rc =
        failed ? nbi_fail(NB_EIO, "cannot sync directory '%s': %s", dir, strerror(errno)) : NB_OK;
    if (fd >= 0)
        close(fd);
    free(dir);
    return rc;
}

/* ---- a directory that appears whole ---- */

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

/* Files that a new model in this directory replaces; whatever else is there is kept. */
static bool belongs_to_model(const char *name)
{
    for (const char *const *p = nbi_model_sidecars; *p; p++)
        if (strcmp(name, *p) == 0)
            return true;
    return (nbi_starts_with(name, "model") && nbi_ends_with(name, ".safetensors")) ||
           strcmp(name, "model.safetensors.index.json") == 0 || strcmp(name, "config.json") == 0 ||
           strcmp(name, "hf_quant_config.json") == 0;
}

/* The next name in a directory but "." and ".."; NULL at the end or on an error, which errno then
 * tells from the end. */
static const char *next_name(DIR *dir)
{
    struct dirent *e;
    do {
        errno = 0;
        e = readdir(dir);
    } while (e && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
    return e ? e->d_name : NULL;
}

bool nbi_dir_is_empty(const char *path)
{
    DIR *dir = opendir(path);
    bool empty = dir && !next_name(dir) && errno == 0;
    if (dir)
        closedir(dir);
    return empty;
}

static enum nb_status listing_failed(const char *dir)
{
    return nbi_fail(NB_EIO, "cannot read directory '%s': %s", dir, strerror(errno));
}

static bool is_weights(const char *name)
{
    return nbi_ends_with(name, ".safetensors") || nbi_ends_with(name, ".dat") ||
           nbi_ends_with(name, ".gguf");
}

static enum nb_status check_content(const char *target)
{
    DIR *dir = opendir(target);
    if (!dir)
        return listing_failed(target);
    int files = 0;
    bool config = false;
    char odd[256] = "";
    const char *name;
    while ((name = next_name(dir))) {
        files++;
        config = config || strcmp(name, "config.json") == 0;
        char *path = nbi_path_join(target, name);
        bool subdirectory = path && nbi_path_is_dir(path);
        free(path);
        if (subdirectory || (!belongs_to_model(name) && is_weights(name)))
            snprintf(odd, sizeof odd, "%s", name);
    }
    enum nb_status rc = errno ? listing_failed(target) : NB_OK;
    closedir(dir);
    NBI_TRY(rc);
    if (files && !config)
        return nbi_fail(NB_EIO,
                        "will not write a model into '%s': it is not empty and not a model "
                        "directory; choose a new name",
                        target);
    if (odd[0])
        return nbi_fail(NB_EIO,
                        "will not replace the model in '%s': it also holds '%s'; choose a "
                        "new name",
                        target, odd);
    return NB_OK;
}

/* What would fail at the end of the work, or surprise, is refused before it. */
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

enum nb_status nbi_stage_begin(struct nbi_stage *stage, const char *target)
{
    *stage = (struct nbi_stage){.lock_fd = -1};
    struct stat st;
    if (nbi_path_dangles(target))
        return nbi_fail(NB_EIO, "cannot write '%s': a link to nothing", target);
    if (stat(target, &st) == 0) {
        if (!S_ISDIR(st.st_mode))
            return nbi_fail(NB_EIO, "cannot write directory '%s': a file has that name", target);
        NBI_TRY(check_replaceable(target));
        stage->target = realpath(target, NULL);
    } else {
        stage->target = strdup(target);
    }
    if (!stage->target)
        return nbi_fail_memory("path", strlen(target));
    size_t n = strlen(stage->target);
    while (n > 1 && stage->target[n - 1] == '/')
        stage->target[--n] = 0;
    enum nb_status rc = nbi_temp_create(stage->target, true, &stage->temp, &stage->lock_fd);
    if (rc != NB_OK)
        nbi_stage_abort(stage);
    return rc;
}

void nbi_stage_abort(struct nbi_stage *stage)
{
    if (stage->temp) {
        nbi_remove_tree(stage->temp);
        close(stage->lock_fd);
    }
    free(stage->temp);
    free(stage->target);
    *stage = (struct nbi_stage){.lock_fd = -1};
}

/* Links files that the new model does not bring into its directory, before the two change places:
 * whatever happens afterwards, no file of the user's has only a temporary home. */
static enum nb_status carry_over(const char *from, const char *to)
{
    DIR *dir = opendir(from);
    if (!dir)
        return listing_failed(from);
    const char *name;
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && (name = next_name(dir))) {
        if (belongs_to_model(name))
            continue;
        char *old = nbi_path_join(from, name), *new = nbi_path_join(to, name);
        if (!old || !new)
            rc = NB_ENOMEM;
        else if (link(old, new) != 0 && errno != EEXIST)
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

/* The new model takes the target's place and temp becomes the old one, in one step. */
static enum nb_status exchange(const struct nbi_stage *stage)
{
    NBI_TRY(carry_over(stage->target, stage->temp));
    if (renameat2(AT_FDCWD, stage->temp, AT_FDCWD, stage->target, RENAME_EXCHANGE) != 0)
        return nbi_fail(NB_EIO, "cannot put the new directory in the place of '%s': %s",
                        stage->target, strerror(errno));
    return nbi_sync_parent(stage->target);
}

enum nb_status nbi_stage_commit(struct nbi_stage *stage)
{
    enum nb_status rc = NB_OK;
    if (fsync(stage->lock_fd) != 0) {
        rc = nbi_fail(NB_EIO, "cannot sync directory '%s': %s", stage->temp, strerror(errno));
    } else if (rename(stage->temp, stage->target) == 0) { /* target absent or empty */
        rc = nbi_sync_parent(stage->target);
        free(stage->temp);
        stage->temp = NULL;
        close(stage->lock_fd);
    } else {
        rc = exchange(stage);
    }
    nbi_stage_abort(stage);
    return rc;
}
