/* file.c - sources, cursors and atomic output files. */
#include "base/file.h"

#include <stdatomic.h>
#include <string.h>

#include "base/dirs.h"
#include "base/syscall.h"

/* ---- reading ---- */

struct nbi_source {
    int fd; /* -1: memory */
    uint64_t size;
    const uint8_t *memory;
    char *path;
};

enum nb_status nbi_source_open(struct nbi_source **out, const char *path)
{
    *out = NULL;
    /* O_NONBLOCK: opening a pipe would otherwise wait for its writer before it can be refused. */
    int fd = nbi_sys_open(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0)
        return nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", path,
                        strerror(errno));
    struct stat st;
    bool known = fstat(fd, &st) == 0;
    if (!known || !S_ISREG(st.st_mode)) {
        enum nb_status rc = nbi_fail(NB_EIO, "cannot read '%s': %s", path,
                                     known ? "not a regular file" : strerror(errno));
        close(fd);
        return rc;
    }
    struct nbi_source *src = calloc(1, sizeof *src);
    char *copy = strdup(path);
    if (!src || !copy) {
        free(src);
        free(copy);
        close(fd);
        return nbi_fail_memory("file handle", sizeof *src);
    }
    *src = (struct nbi_source){.fd = fd, .size = (uint64_t)st.st_size, .path = copy};
    *out = src;
    return NB_OK;
}

enum nb_status nbi_source_memory(struct nbi_source **out, const void *bytes, size_t len)
{
    *out = NULL;
    struct nbi_source *src = calloc(1, sizeof *src);
    if (!src)
        return nbi_fail_memory("file handle", sizeof *src);
    *src = (struct nbi_source){.fd = -1, .size = len, .memory = bytes};
    *out = src;
    return NB_OK;
}

void nbi_source_close(struct nbi_source *src)
{
    if (!src)
        return;
    if (src->fd >= 0)
        close(src->fd);
    free(src->path);
    free(src);
}

uint64_t nbi_source_size(const struct nbi_source *src)
{
    return src->size;
}

const char *nbi_source_path(const struct nbi_source *src)
{
    return src->path ? src->path : "(memory)";
}

enum nb_status nbi_source_read(const struct nbi_source *src, uint64_t offset, void *dst, size_t len)
{
    if (offset > src->size || len > src->size - offset)
        return nbi_fail(NB_EFORMAT, "%zu bytes wanted at offset %llu of a file of %llu", len,
                        (unsigned long long)offset, (unsigned long long)src->size);
    if (src->fd < 0) {
        if (len)
            memcpy(dst, src->memory + offset, len);
        return NB_OK;
    }
    char *p = dst;
    while (len) {
        ssize_t n = pread(src->fd, p, len, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return nbi_fail(NB_EIO, "cannot read '%s' at offset %llu: %s", src->path,
                            (unsigned long long)offset, strerror(errno));
        if (n == 0)
            return nbi_fail(NB_EIO, "'%s' became shorter while it was read", src->path);
        p += n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return NB_OK;
}

enum nb_status nbi_file_read(const char *path, size_t max, char **out, size_t *len)
{
    struct nbi_source *src = NULL;
    *out = NULL;
    NBI_TRY(nbi_source_open(&src, path));
    enum nb_status rc = NB_OK;
    char *buf = NULL;
    if (src->size > max)
        rc = nbi_fail(NB_EFORMAT, "'%s' is %llu bytes, more than the %zu expected at most", path,
                      (unsigned long long)src->size, max);
    else if (!(buf = malloc(src->size + 1)))
        rc = nbi_fail_memory("file contents", src->size);
    else
        rc = nbi_source_read(src, 0, buf, src->size);
    if (rc == NB_OK) {
        *len = src->size;
        buf[src->size] = 0;
        *out = buf;
    } else {
        free(buf);
    }
    nbi_source_close(src);
    return rc;
}

/* ---- cursor ---- */

void nbi_cursor_init(struct nbi_cursor *c, const struct nbi_source *src)
{
    c->src = src;
    c->pos = 0;
    c->end = src->size;
    c->window_at = 0;
    c->window_len = 0;
}

uint64_t nbi_cursor_left(const struct nbi_cursor *c)
{
    return c->end - c->pos;
}

static enum nb_status check_left(const struct nbi_cursor *c, uint64_t len)
{
    if (len > c->end - c->pos)
        return nbi_fail(NB_EFORMAT, "file ends early: %llu bytes wanted at offset %llu, %llu left",
                        (unsigned long long)len, (unsigned long long)c->pos,
                        (unsigned long long)(c->end - c->pos));
    return NB_OK;
}

enum nb_status nbi_cursor_bytes(struct nbi_cursor *c, void *dst, uint64_t len)
{
    NBI_TRY(check_left(c, len));
    if (len > sizeof c->window) {
        NBI_TRY(nbi_source_read(c->src, c->pos, dst, len));
        c->pos += len;
        return NB_OK;
    }
    if (c->pos < c->window_at || c->pos - c->window_at > c->window_len ||
        c->window_len - (c->pos - c->window_at) < len) {
        uint64_t n = c->end - c->pos;
        n = n < sizeof c->window ? n : sizeof c->window;
        c->window_len = 0;
        NBI_TRY(nbi_source_read(c->src, c->pos, c->window, n));
        c->window_at = c->pos;
        c->window_len = n;
    }
    memcpy(dst, c->window + (c->pos - c->window_at), len);
    c->pos += len;
    return NB_OK;
}

enum nb_status nbi_cursor_skip(struct nbi_cursor *c, uint64_t len)
{
    NBI_TRY(check_left(c, len));
    c->pos += len;
    return NB_OK;
}

enum nb_status nbi_cursor_u32(struct nbi_cursor *c, uint32_t *v)
{
    uint8_t b[4];
    NBI_TRY(nbi_cursor_bytes(c, b, sizeof b));
    *v = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    return NB_OK;
}

enum nb_status nbi_cursor_u64(struct nbi_cursor *c, uint64_t *v)
{
    uint32_t lo, hi;
    NBI_TRY(nbi_cursor_u32(c, &lo));
    NBI_TRY(nbi_cursor_u32(c, &hi));
    *v = (uint64_t)hi << 32 | lo;
    return NB_OK;
}

enum nb_status nbi_cursor_uleb(struct nbi_cursor *c, uint64_t *v)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        uint8_t b;
        NBI_TRY(nbi_cursor_bytes(c, &b, 1));
        uint64_t group = b & 0x7F;
        if (shift == 63 && group > 1)
            break;
        value |= group << shift;
        if (!(b & 0x80)) {
            if (b == 0 && shift > 0)
                return nbi_fail(NB_EFORMAT, "number at offset %llu has a needless last byte",
                                (unsigned long long)(c->pos - 1));
            *v = value;
            return NB_OK;
        }
    }
    return nbi_fail(NB_EFORMAT, "number at offset %llu does not fit 64 bits",
                    (unsigned long long)(c->pos - 1));
}

/* ---- writing ---- */

#define FLUSH_BYTES ((uint64_t)64 << 20)

struct nbi_outfile {
    int fd;
    char *target, *temp;
    _Atomic uint64_t unflushed; /* bytes written since the last sync_file_range */
};

static void outfile_free(struct nbi_outfile *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->target);
    free(f->temp);
    free(f);
}

/* If the target is a symbolic link, the file it points to is written; the rename must not replace
 * the link. */
static char *resolve_target(const char *path)
{
    char *real = realpath(path, NULL);
    return real ? real : strdup(path);
}

enum nb_status nbi_outfile_open(struct nbi_outfile **out, const char *path)
{
    *out = NULL;
    struct nbi_outfile *f = calloc(1, sizeof *f);
    if (!f)
        return nbi_fail_memory("output file", sizeof *f);
    f->fd = -1;
    f->target = resolve_target(path);
    if (!f->target) {
        outfile_free(f);
        return nbi_fail_memory("path", strlen(path));
    }
    struct stat st;
    bool exists = stat(f->target, &st) == 0;
    const char *problem = exists && !S_ISREG(st.st_mode) ? "it exists and is not a regular file"
                          : exists && access(path, W_OK) != 0 ? "it is read-only"
                          : nbi_path_dangles(path)            ? "a link to nothing"
                                                              : NULL;
    if (problem) {
        outfile_free(f);
        return nbi_fail(NB_EIO, "cannot write '%s': %s", path, problem);
    }
    enum nb_status rc = nbi_temp_create(f->target, false, &f->temp, &f->fd);
    if (rc != NB_OK) {
        outfile_free(f);
        return rc;
    }
    if (exists && nbi_sys_fchmod(f->fd, st.st_mode & 0777) != 0) {
        rc = nbi_fail(NB_EIO, "cannot set the mode of '%s': %s", f->temp, strerror(errno));
        nbi_outfile_abort(f);
        return rc;
    }
    *out = f;
    return NB_OK;
}

static enum nb_status write_failed(const struct nbi_outfile *f, const char *what)
{
    return nbi_fail(NB_EIO, "cannot %s '%s': %s%s", what, f->target, strerror(errno),
                    errno == ENOSPC ? " (free some space or choose another target)" : "");
}

enum nb_status nbi_outfile_reserve(struct nbi_outfile *f, uint64_t bytes)
{
    if (bytes > INT64_MAX)
        return nbi_fail(NB_EIO, "cannot write '%s': %llu bytes are too many for a file", f->target,
                        (unsigned long long)bytes);
    if (bytes == 0 || nbi_sys_fallocate(f->fd, (off_t)bytes) == 0)
        return NB_OK;
    if (errno == EOPNOTSUPP || errno == ENOSYS ||
        errno == EINVAL) /* not supported; a full disk shows in write */
        return nbi_sys_ftruncate(f->fd, (off_t)bytes) == 0 ? NB_OK : write_failed(f, "write");
    return write_failed(f, "reserve space for");
}

enum nb_status nbi_outfile_write(struct nbi_outfile *f, uint64_t offset, const void *bytes,
                                 size_t len)
{
    const char *p = bytes;
    if (atomic_fetch_add(&f->unflushed, len) + len >= FLUSH_BYTES) {
        /* Starts writeback early; otherwise the final sync waits for all of it at once. */
        atomic_store(&f->unflushed, 0);
        sync_file_range(f->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
    }
    while (len) {
        ssize_t n = pwrite(f->fd, p, len, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return write_failed(f, "write");
        p += n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return NB_OK;
}

const char *nbi_outfile_temp(const struct nbi_outfile *f)
{
    return f->temp;
}

void nbi_outfile_abort(struct nbi_outfile *f)
{
    if (!f)
        return;
    nbi_sys_unlink(f->temp);
    outfile_free(f);
}

enum nb_status nbi_outfile_commit(struct nbi_outfile *f)
{
    bool done = false;
    enum nb_status rc = nbi_sys_fsync(f->fd) == 0 ? nbi_replace(f->temp, f->target, 0, &done)
                                                  : write_failed(f, "sync");
    if (done)
        outfile_free(f);
    else
        nbi_outfile_abort(f);
    return rc;
}

enum nb_status nbi_file_write(const char *path, const void *bytes, size_t len)
{
    struct nbi_outfile *f = NULL;
    NBI_TRY(nbi_outfile_open(&f, path));
    enum nb_status rc = nbi_outfile_write(f, 0, bytes, len);
    if (rc != NB_OK) {
        nbi_outfile_abort(f);
        return rc;
    }
    return nbi_outfile_commit(f);
}
