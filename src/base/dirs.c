/* dirs.c - paths, temporary names, listing and removing of directories. */
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
    const char *name;
    while (dir && (name = nbi_dir_next(dir))) {
        char *child = nbi_path_join(path, name);
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

/* A dead writer's lock is free. */
void nbi_temp_clean(const char *dir, const char *prefix)
{
    DIR *d = opendir(dir);
    const char *name;
    while (d && (name = nbi_dir_next(d))) {
        if (!nbi_starts_with(name, prefix) || !strstr(name, ".nibble-"))
            continue;
        char *path = nbi_path_join(dir, name);
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
    nbi_temp_clean(dir, prefix);
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

/* ---- listing ---- */

const char *nbi_dir_next(DIR *dir)
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
    bool empty = dir && !nbi_dir_next(dir) && errno == 0;
    if (dir)
        closedir(dir);
    return empty;
}

enum nb_status nbi_dir_make(const char *dir)
{
    if (nbi_path_is_dir(dir))
        return NB_OK;
    if (mkdir(dir, 0777) != 0)
        return nbi_fail(NB_EIO, "cannot make directory '%s': %s", dir, strerror(errno));
    return nbi_sync_parent(dir);
}
