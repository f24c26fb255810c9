/* syscall.h - system calls that are retried when a signal interrupts them (EINTR).
 *
 * The command line installs its handlers without SA_RESTART, so that Ctrl-C ends waiting for input.
 * Network file systems may then interrupt calls that never fail with EINTR on a local disk. Whether
 * to stop after a signal is decided by nbi_check_interrupt, not by the call that it happened to
 * hit. There is no close(): on Linux the descriptor is closed even if close() returns EINTR. */
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define NBI_RETRY(rc, call)                                                                        \
    do                                                                                             \
        (rc) = (call);                                                                             \
    while ((rc) == -1 && errno == EINTR)

static inline int nbi_sys_open(const char *path, int flags, mode_t mode)
{
    int rc;
    NBI_RETRY(rc, open(path, flags | O_CLOEXEC, mode));
    return rc;
}

static inline DIR *nbi_sys_opendir(const char *path)
{
    DIR *dir;
    do
        dir = opendir(path);
    while (!dir && errno == EINTR);
    return dir;
}

static inline int nbi_sys_fsync(int fd)
{
    int rc;
    NBI_RETRY(rc, fsync(fd));
    return rc;
}

/* flags: 0 or RENAME_EXCHANGE. A network file system may have carried out a call that was
 * interrupted. Repeating it would fail, or undo an exchange, so it is repeated only if `from` is
 * unchanged. */
static inline int nbi_sys_rename(const char *from, const char *to, unsigned flags)
{
    struct stat own, now;
    if (lstat(from, &own) != 0)
        return -1;
    for (;;) {
        int rc = flags ? renameat2(AT_FDCWD, from, AT_FDCWD, to, flags) : rename(from, to);
        if (rc == 0 || errno != EINTR)
            return rc;
        if (lstat(from, &now) != 0 ? errno == ENOENT : now.st_ino != own.st_ino)
            return 0;
    }
}

static inline int nbi_sys_link(const char *from, const char *to)
{
    int rc;
    NBI_RETRY(rc, link(from, to));
    return rc;
}

static inline int nbi_sys_unlink(const char *path)
{
    int rc;
    NBI_RETRY(rc, unlink(path));
    return rc;
}

static inline int nbi_sys_mkdir(const char *path, mode_t mode)
{
    int rc;
    NBI_RETRY(rc, mkdir(path, mode));
    return rc;
}

static inline int nbi_sys_rmdir(const char *path)
{
    int rc;
    NBI_RETRY(rc, rmdir(path));
    return rc;
}

static inline int nbi_sys_flock(int fd, int operation)
{
    int rc;
    NBI_RETRY(rc, flock(fd, operation));
    return rc;
}

static inline int nbi_sys_fchmod(int fd, mode_t mode)
{
    int rc;
    NBI_RETRY(rc, fchmod(fd, mode));
    return rc;
}

static inline int nbi_sys_ftruncate(int fd, off_t size)
{
    int rc;
    NBI_RETRY(rc, ftruncate(fd, size));
    return rc;
}

static inline int nbi_sys_fallocate(int fd, off_t size)
{
    int rc;
    NBI_RETRY(rc, fallocate(fd, 0, 0, size));
    return rc;
}
