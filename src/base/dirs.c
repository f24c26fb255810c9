/* dirs.c - paths, temporary names, listing and removing directories. */
#include "base/dirs.h"

#include <string.h>

#include "base/file.h"
#include "base/str.h"
#include "base/syscall.h"

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

/* Resolves the directory of path and appends the last name, which need not exist. NULL: no such
 * directory. */
static char *resolve(const char *path)
{
    char *dir = nbi_path_dir(path), *real = dir ? realpath(dir, NULL) : NULL;
    char *all = real ? nbi_path_join(real, nbi_path_base(path)) : NULL;
    free(dir);
    free(real);
    return all;
}

bool nbi_path_same_target(const char *a, const char *b)
{
    if (strcmp(a, b) == 0 || nbi_path_same(a, b))
        return true;
    char *x = resolve(a), *y = resolve(b);
    bool same = x && y && strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

bool nbi_path_in(const char *path, const char *dir)
{
    char *parent = nbi_path_dir(path);
    bool in = parent && nbi_path_same(parent, dir);
    free(parent);
    return in;
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
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *slash = memrchr(path, '/', n);
    char *dir = !slash          ? strdup(".")
                : slash == path ? strdup("/")
                                : strndup(path, (size_t)(slash - path));
    if (!dir)
        nbi_fail_memory("path", strlen(path));
    return dir;
}

/* ---- temporary names ---- */

/* Tries unlink() first: it tells a directory from a file, so there is no stat() that could fail. */
void nbi_remove_tree(const char *path)
{
    if (nbi_sys_unlink(path) == 0 || (errno != EISDIR && errno != EPERM))
        return;
    DIR *dir = nbi_sys_opendir(path);
    const char *name;
    while (dir && (name = nbi_dir_next(dir))) {
        char *child = nbi_path_join(path, name);
        if (child)
            nbi_remove_tree(child);
        free(child);
    }
    if (dir)
        closedir(dir);
    nbi_sys_rmdir(path);
}

/* Whether path still names the open file fd: 1 yes, 0 no, -1 unknown. Between open and lock,
 * another process may have removed the entry, and even created a new one of the same name. */
static int still_named(int fd, const char *path)
{
    struct stat a, b;
    if (fstat(fd, &a) != 0)
        return -1;
    if (lstat(path, &b) != 0)
        return errno == ENOENT ? 0 : -1;
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Whether nbi_temp_create made dir. */
static bool is_temporary(const char *dir)
{
    const char *name = nbi_path_base(dir);
    return name[0] == '.' && strstr(name, ".nibble-");
}

/* Removes path unless a live writer holds its lock. */
static void remove_abandoned(const char *path)
{
    int fd = nbi_sys_open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW, 0);
    if (fd < 0)
        return;
    if (nbi_sys_flock(fd, LOCK_EX | LOCK_NB) == 0 && still_named(fd, path) == 1)
        nbi_remove_tree(path);
    close(fd);
}

void nbi_temp_clean(const char *dir, const char *prefix)
{
    DIR *d = nbi_sys_opendir(dir);
    const char *name;
    while (d && (name = nbi_dir_next(d))) {
        if (!nbi_starts_with(name, prefix) || !strstr(name, ".nibble-"))
            continue;
        char *path = nbi_path_join(dir, name);
        if (path)
            remove_abandoned(path);
        free(path);
    }
    if (d)
        closedir(d);
}

static void temp_prefix(char prefix[240], const char *target)
{
    snprintf(prefix, 240, ".%.200s.nibble-", nbi_path_base(target));
}

enum nb_status nbi_temp_clean_for(const char *target)
{
    char prefix[240], *dir = nbi_path_dir(target);
    if (!dir)
        return NB_ENOMEM;
    temp_prefix(prefix, target);
    nbi_temp_clean(dir, prefix);
    free(dir);
    return NB_OK;
}

/* On failure returns false with errno set; EEXIST means that another name is needed. */
static bool create_one(const char *path, bool directory, int *fd)
{
    if (directory && nbi_sys_mkdir(path, 0777) != 0)
        return false;
    *fd = directory ? nbi_sys_open(path, O_RDONLY | O_DIRECTORY, 0)
                    : nbi_sys_open(path, O_RDWR | O_CREAT | O_EXCL, 0666);
    if (*fd < 0) {
        int reason = errno;
        /* A process that cleans up may remove the directory before it is locked. */
        bool cleaned = directory && (reason == ENOENT || reason == ENOTDIR);
        if (directory && !cleaned)
            nbi_sys_rmdir(path);
        errno = cleaned ? EEXIST : reason;
        return false;
    }
    /* The lock tells other processes that this writer is alive. A process that is cleaning up may
     * hold it for a moment, and then removes the entry. On file systems without locks nothing is
     * cleaned up. */
    nbi_sys_flock(*fd, LOCK_EX);
    if (still_named(*fd, path) != 0)
        return true;
    close(*fd);
    *fd = -1;
    errno = EEXIST;
    return false;
}

enum nb_status nbi_temp_create(const char *target, bool directory, char **temp, int *fd)
{
    *temp = NULL;
    *fd = -1;
    char *dir = nbi_path_dir(target);
    if (!dir)
        return NB_ENOMEM;
    char prefix[240], name[280];
    temp_prefix(prefix, target);
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

/* Opens the directory of path; *fd is -1 if that is a temporary one. */
static enum nb_status open_parent(const char *path, int *fd)
{
    char *dir = nbi_path_dir(path);
    *fd = -1;
    if (!dir)
        return NB_ENOMEM;
    bool staged = is_temporary(dir);
    if (!staged)
        *fd = nbi_sys_open(dir, O_RDONLY | O_DIRECTORY, 0);
    enum nb_status rc = *fd >= 0 || staged
                            ? NB_OK
                            : nbi_fail(NB_EIO, "cannot open its directory: %s", strerror(errno));
    free(dir);
    return rc;
}

/* Makes the directory entry of path durable. Some file systems cannot sync a directory and return
 * EINVAL. */
static enum nb_status sync_entry(int parent, const char *path)
{
    if (parent < 0 || nbi_sys_fsync(parent) == 0 || errno == EINVAL)
        return NB_OK;
    return nbi_fail(NB_EIO, "'%s' is in place, but its directory cannot be synced: %s", path,
                    strerror(errno));
}

enum nb_status nbi_replace(const char *temp, const char *target, unsigned flags, bool *done)
{
    int parent;
    *done = false;
    /* Opened before the rename, while a failure changes nothing. */
    NBI_TRY(nbi_context(open_parent(target, &parent), "cannot write '%s'", target));
    *done = nbi_sys_rename(temp, target, flags) == 0;
    enum nb_status rc =
        *done ? sync_entry(parent, target)
              : nbi_fail(NB_EIO, "cannot rename '%s' to '%s': %s", temp, target, strerror(errno));
    if (parent >= 0)
        close(parent);
    return rc;
}

/* ---- listing ---- */

const char *nbi_dir_next(DIR *dir)
{
    struct dirent *e;
    do {
        errno = 0;
        e = readdir(dir);
    } while (e ? strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 : errno == EINTR);
    return e ? e->d_name : NULL;
}

bool nbi_dir_is_empty(const char *path)
{
    DIR *dir = nbi_sys_opendir(path);
    bool empty = dir && !nbi_dir_next(dir) && errno == 0;
    if (dir)
        closedir(dir);
    return empty;
}

enum nb_status nbi_dir_make(const char *dir)
{
    int parent;
    if (nbi_path_is_dir(dir))
        return NB_OK;
    NBI_TRY(nbi_context(open_parent(dir, &parent), "cannot make directory '%s'", dir));
    enum nb_status rc =
        nbi_sys_mkdir(dir, 0777) == 0
            ? sync_entry(parent, dir)
            : nbi_fail(NB_EIO, "cannot make directory '%s': %s", dir, strerror(errno));
    if (parent >= 0)
        close(parent);
    return rc;
}
