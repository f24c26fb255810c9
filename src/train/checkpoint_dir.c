/* checkpoint_dir.c - the checkpoints of a directory: names, the lock, the newest intact one, and
 * removal of old ones. */
#include <errno.h>
#include <string.h>

#include "base/array.h"
#include "base/dirs.h"
#include "base/file.h"
#include "base/log.h"
#include "base/str.h"
#include "base/syscall.h"
#include "train/checkpoint.h"

#define PREFIX   "step-"
#define SUFFIX   ".ckpt"
#define ACCEPTED "good.ckpt"

/* ---- names ---- */

static char *path_of(const char *dir, uint64_t step)
{
    char name[48];
    snprintf(name, sizeof name, PREFIX "%08llu" SUFFIX, (unsigned long long)step);
    return nbi_path_join(dir, name);
}

/* Accepts only names that path_of makes, so that a step has one name. */
static bool step_of(const char *name, uint64_t *step)
{
    char again[48];
    if (!nbi_starts_with(name, PREFIX) || strlen(name) >= sizeof again)
        return false;
    *step = strtoull(name + strlen(PREFIX), NULL, 10);
    snprintf(again, sizeof again, PREFIX "%08llu" SUFFIX, (unsigned long long)*step);
    return *step <= NBI_CKPT_STEP_MAX && strcmp(name, again) == 0;
}

struct steps {
    uint64_t *v;
    size_t count, capacity;
};

static enum nb_status add_step(struct steps *s, uint64_t step)
{
    NBI_TRY(NBI_ARRAY_RESERVE(s->v, s->capacity, s->count + 1, "list of checkpoints"));
    s->v[s->count++] = step;
    return NB_OK;
}

static int newest_first(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

/* Lists the steps of dir's checkpoints, newest first. The caller frees s->v, also on failure. */
static enum nb_status list_steps(const char *dir, struct steps *s)
{
    *s = (struct steps){0};
    DIR *d = nbi_sys_opendir(dir);
    if (!d)
        return nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot read directory '%s': %s",
                        dir, strerror(errno));
    enum nb_status rc = NB_OK;
    const char *name;
    uint64_t step;
    while (rc == NB_OK && (name = nbi_dir_next(d)))
        if (step_of(name, &step))
            rc = add_step(s, step);
    if (rc == NB_OK && errno)
        rc = nbi_fail(NB_EIO, "cannot read directory '%s': %s", dir, strerror(errno));
    closedir(d);
    if (s->count)
        qsort(s->v, s->count, sizeof *s->v, newest_first);
    return rc;
}

size_t nbi_checkpoint_count(const char *dir)
{
    struct steps s;
    enum nb_status rc = list_steps(dir, &s);
    free(s.v);
    return rc == NB_OK ? s.count : 0;
}

/* ---- saving ---- */

/* A file that cannot be removed only takes disk space: that is a warning. */
static enum nb_status remove_old(const char *dir, int keep, uint64_t newest)
{
    struct steps s;
    enum nb_status rc = list_steps(dir, &s);
    for (size_t i = 0; rc == NB_OK && i < s.count; i++) {
        if (s.v[i] > newest || keep-- > 0)
            continue;
        char *path = path_of(dir, s.v[i]);
        if (!path)
            rc = NB_ENOMEM;
        else if (nbi_sys_unlink(path) != 0 && errno != ENOENT)
            nbi_log(NB_LOG_WARN, "cannot remove the old checkpoint '%s': %s", path,
                    strerror(errno));
        free(path);
    }
    free(s.v);
    return rc;
}

enum nb_status nbi_checkpoint_save(const char *dir, int keep,
                                   const struct nbi_ckpt_content *content)
{
    NBI_TRY(nbi_dir_make(dir));
    nbi_temp_clean(dir, "." PREFIX);
    char *path = path_of(dir, content->step);
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = nbi_checkpoint_write(path, content);
    free(path);
    return rc == NB_OK ? remove_old(dir, keep > 1 ? keep : 1, content->step) : rc;
}

enum nb_status nbi_checkpoint_save_accepted(const char *dir, const struct nbi_ckpt_content *content)
{
    char *path = nbi_path_join(dir, ACCEPTED);
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = nbi_checkpoint_write(path, content);
    free(path);
    return rc;
}

/* ---- the lock ---- */

struct nbi_ckpt_lock {
    int fd;
};

/* Fails with the process id that stands in the lock file. */
static enum nb_status fail_locked(const char *dir, int fd)
{
    char text[32] = "", who[64] = "another process";
    long pid = pread(fd, text, sizeof text - 1, 0) > 0 ? strtol(text, NULL, 10) : 0;
    if (pid > 0)
        snprintf(who, sizeof who, "process %ld", pid);
    return nbi_fail(
        NB_EIO,
        "%s is training with the checkpoints in '%s': wait for its end, or use another directory",
        who, dir);
}

/* On a full disk the lock is taken without a process id in its file. */
static enum nb_status take_lock(const char *dir, int fd)
{
    if (nbi_sys_flock(fd, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK ? fail_locked(dir, fd) : NB_OK;
    if (nbi_sys_ftruncate(fd, 0) == 0)
        dprintf(fd, "%ld\n", (long)getpid());
    return NB_OK;
}

static enum nb_status open_lock(const char *dir, int *fd)
{
    char *path = nbi_path_join(dir, "lock");
    if (!path)
        return NB_ENOMEM;
    *fd = nbi_sys_open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0666);
    enum nb_status rc =
        *fd >= 0 ? NB_OK : nbi_fail(NB_EIO, "cannot write '%s': %s", path, strerror(errno));
    free(path);
    return rc;
}

enum nb_status nbi_checkpoint_lock(struct nbi_ckpt_lock **out, const char *dir)
{
    int fd;
    *out = NULL;
    NBI_TRY(open_lock(dir, &fd));
    enum nb_status rc = take_lock(dir, fd);
    struct nbi_ckpt_lock *lock = rc == NB_OK ? malloc(sizeof *lock) : NULL;
    if (!lock) {
        close(fd);
        return rc != NB_OK ? rc : nbi_fail_memory("lock", sizeof *lock);
    }
    lock->fd = fd;
    *out = lock;
    return NB_OK;
}

void nbi_checkpoint_unlock(struct nbi_ckpt_lock *lock)
{
    if (!lock)
        return;
    close(lock->fd);
    free(lock);
}

/* ---- the newest ---- */

static enum nb_status open_verified(struct nbi_checkpoint **out, const char *path, uint64_t step)
{
    NBI_TRY(nbi_checkpoint_open(out, path));
    enum nb_status rc = nbi_checkpoint_verify(*out);
    uint64_t said = nbi_checkpoint_step(*out);
    if (rc == NB_OK && said != step)
        rc = nbi_fail(NB_EFORMAT, "checkpoint '%s': it is that of step %llu, not %llu", path,
                      (unsigned long long)said, (unsigned long long)step);
    if (rc != NB_OK) {
        nbi_checkpoint_close(*out);
        *out = NULL;
    }
    return rc;
}

enum nb_status nbi_checkpoint_accepted(struct nbi_checkpoint **out, const char *dir, uint64_t step)
{
    char *path = nbi_path_join(dir, ACCEPTED);
    *out = NULL;
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = open_verified(out, path, step);
    free(path);
    return rc;
}

enum nb_status nbi_checkpoint_latest(struct nbi_checkpoint **out, const char *dir)
{
    struct steps s;
    char first[512] = "";
    *out = NULL;
    enum nb_status rc = list_steps(dir, &s);
    if (rc == NB_OK && s.count == 0)
        rc = nbi_fail(NB_ENOTFOUND, "there is no checkpoint in '%s'", dir);
    for (size_t i = 0; rc == NB_OK && i < s.count && !*out; i++) {
        char *path = path_of(dir, s.v[i]);
        rc = path ? open_verified(out, path, s.v[i]) : NB_ENOMEM;
        free(path);
        if (rc != NB_EFORMAT && rc != NB_EIO && rc != NB_ENOTFOUND)
            continue; /* success, or an error that older files would meet as well */
        rc = NB_OK;
        nbi_log(NB_LOG_WARN, "%s; %s", nb_last_error(),
                i + 1 < s.count ? "trying the one before it" : "there is none before it");
        if (i == 0)
            snprintf(first, sizeof first, "%s", nb_last_error());
    }
    free(s.v);
    if (rc == NB_OK && !*out)
        rc = nbi_fail(NB_EFORMAT, "none of the %zu checkpoints in '%s' is usable; the newest: %s",
                      s.count, dir, first);
    return rc;
}
