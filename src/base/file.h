/* file.h - sources, which read at any position, and output files, which appear complete or not at
 * all.
 *
 * Files are read, never mapped: a file that shrinks or a failing disk is then an error message
 * instead of SIGBUS. */
#pragma once

#include <stddef.h>

#include "base/status.h"

/* ---- reading ---- */

struct nbi_source;

/* Opens a regular file; directories, pipes and devices are refused. */
enum nb_status nbi_source_open(struct nbi_source **out, const char *path);

/* Reads from memory instead of a file. bytes is borrowed and must outlive the source. */
enum nb_status nbi_source_memory(struct nbi_source **out, const void *bytes, size_t len);

void nbi_source_close(struct nbi_source *src);
uint64_t nbi_source_size(const struct nbi_source *src);
const char *nbi_source_path(const struct nbi_source *src); /* "(memory)" for memory */

/* Reads all of [offset, offset + len) or fails. Thread-safe. */
enum nb_status nbi_source_read(const struct nbi_source *src, uint64_t offset, void *dst,
                               size_t len);

/* Reads a whole file of at most max bytes and adds a NUL. The caller frees *out. */
enum nb_status nbi_file_read(const char *path, size_t max, char **out, size_t *len);

/* ---- a bounded cursor over a source ---- */

/* Reads little-endian fields from front to back. Every read is checked against the bytes left. */
struct nbi_cursor {
    const struct nbi_source *src;
    uint64_t pos, end;
    uint64_t window_at; /* offset of window in the source */
    size_t window_len;
    uint8_t window[4096];
};

void nbi_cursor_init(struct nbi_cursor *c, const struct nbi_source *src);
uint64_t nbi_cursor_left(const struct nbi_cursor *c);
enum nb_status nbi_cursor_bytes(struct nbi_cursor *c, void *dst, uint64_t len);
enum nb_status nbi_cursor_skip(struct nbi_cursor *c, uint64_t len);
enum nb_status nbi_cursor_u32(struct nbi_cursor *c, uint32_t *v);
enum nb_status nbi_cursor_u64(struct nbi_cursor *c, uint64_t *v);

/* Unsigned LEB128. Overlong encodings and values beyond 64 bits are errors. */
enum nb_status nbi_cursor_uleb(struct nbi_cursor *c, uint64_t *v);

/* ---- writing ---- */

/* An output file is written under a temporary name next to the target. Commit syncs it, renames it
 * to the target and syncs the directory. Until then the target is untouched. A crash leaves at most
 * the temporary file, which the next writer of the same target removes. */
struct nbi_outfile;

enum nb_status nbi_outfile_open(struct nbi_outfile **out, const char *path);

/* Reserves disk space, so that a full disk is reported before the work and not after it. */
enum nb_status nbi_outfile_reserve(struct nbi_outfile *f, uint64_t bytes);
enum nb_status nbi_outfile_write(struct nbi_outfile *f, uint64_t offset, const void *bytes,
                                 size_t len);

const char *nbi_outfile_temp(const struct nbi_outfile *f); /* where the bytes are until commit */

/* Both free f, also on failure. */
enum nb_status nbi_outfile_commit(struct nbi_outfile *f);
void nbi_outfile_abort(struct nbi_outfile *f); /* f may be NULL */

enum nb_status nbi_file_write(const char *path, const void *bytes, size_t len);

/* ---- paths ---- */

bool nbi_path_is_dir(const char *path);
bool nbi_path_exists(const char *path); /* if false, errno says why */
bool nbi_path_is_file(const char *path);
bool nbi_path_dangles(const char *path);                 /* a symbolic link to nothing */
bool nbi_path_same(const char *a, const char *b);        /* both exist and are the same file */
bool nbi_path_same_target(const char *a, const char *b); /* same file, now or once created */
bool nbi_path_in(const char *path, const char *dir);     /* directly in dir, which exists */

/* Returns "DIR/NAME", which the caller frees; NULL and a message if memory runs out. */
char *nbi_path_join(const char *dir, const char *name);
char *nbi_path_dir(const char *path);        /* "." if path has none */
const char *nbi_path_base(const char *path); /* points into path */
