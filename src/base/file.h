/* file.h - bytes in: a source read at any position; bytes out: files that appear whole or not at
 * all.
 *
 * Files are read, never mapped: one that shrinks or a disk that fails is then an error message and
 * not a signal. */
#pragma once

#include <stddef.h>

#include "base/status.h"

/* ---- reading ---- */

struct nbi_source;

/* Regular files only: a directory, a pipe or a device is refused. */
enum nb_status nbi_source_open(struct nbi_source **out, const char *path);

/* Borrowed memory in place of a file; bytes must outlive the source. */
enum nb_status nbi_source_memory(struct nbi_source **out, const void *bytes, size_t len);

void nbi_source_close(struct nbi_source *src);
uint64_t nbi_source_size(const struct nbi_source *src);
const char *nbi_source_path(const struct nbi_source *src); /* "(memory)" for memory */

/* All of [offset, offset + len) or an error. Thread-safe. */
enum nb_status nbi_source_read(const struct nbi_source *src, uint64_t offset, void *dst,
                               size_t len);

/* A whole small file, NUL-terminated; larger than max is an error. The caller frees *out. */
enum nb_status nbi_file_read(const char *path, size_t max, char **out, size_t *len);

/* ---- a bounded cursor over a source ---- */

/* Little-endian fields from front to back. Every read is checked against what is left. */
struct nbi_cursor {
    const struct nbi_source *src;
    uint64_t pos, end;
    uint64_t window_at; /* where window starts in the source */
    size_t window_len;
    uint8_t window[4096];
};

void nbi_cursor_init(struct nbi_cursor *c, const struct nbi_source *src);
uint64_t nbi_cursor_left(const struct nbi_cursor *c);
enum nb_status nbi_cursor_bytes(struct nbi_cursor *c, void *dst, uint64_t len);
enum nb_status nbi_cursor_skip(struct nbi_cursor *c, uint64_t len);
enum nb_status nbi_cursor_u32(struct nbi_cursor *c, uint32_t *v);
enum nb_status nbi_cursor_u64(struct nbi_cursor *c, uint64_t *v);

/* Unsigned LEB128; longer than needed or past 64 bits is an error. */
enum nb_status nbi_cursor_uleb(struct nbi_cursor *c, uint64_t *v);

/* ---- writing ---- */

/* Written under a temporary name beside the target; commit syncs it, renames it over the target
 * and syncs the directory. Until then the target is untouched, and a crash leaves at most the
 * temporary file, which the next writer of the same target removes. */
struct nbi_outfile;

enum nb_status nbi_outfile_open(struct nbi_outfile **out, const char *path);

/* Reserves disk space, so that a full disk shows before the work and not after it. */
enum nb_status nbi_outfile_reserve(struct nbi_outfile *f, uint64_t bytes);
enum nb_status nbi_outfile_write(struct nbi_outfile *f, uint64_t offset, const void *bytes,
                                 size_t len);

const char *nbi_outfile_temp(const struct nbi_outfile *f); /* where the bytes are until commit */

/* Both end the object, whatever they return. */
enum nb_status nbi_outfile_commit(struct nbi_outfile *f);
void nbi_outfile_abort(struct nbi_outfile *f); /* NULL is fine */

enum nb_status nbi_file_write(const char *path, const void *bytes, size_t len);

/* ---- paths ---- */

bool nbi_path_is_dir(const char *path);
bool nbi_path_exists(const char *path); /* if not, errno says why */
bool nbi_path_is_file(const char *path);
bool nbi_path_dangles(const char *path);                 /* a symbolic link to nothing */
bool nbi_path_same(const char *a, const char *b);        /* both exist and are the same file */
bool nbi_path_same_target(const char *a, const char *b); /* the same, or will be once they exist */
bool nbi_path_in(const char *path, const char *dir);     /* directly in dir, which exists */

/* "DIR/NAME" in memory of the caller's; NULL when memory is out (message set). */
char *nbi_path_join(const char *dir, const char *name);
char *nbi_path_dir(const char *path);        /* "." where there is none */
const char *nbi_path_base(const char *path); /* points into path */
