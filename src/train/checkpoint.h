/* checkpoint.h - the state of a training run in one file, and the checkpoints of a directory.
 *
 * A checkpoint, `step-00000120.ckpt`, holds the settings as JSON, the step, named numbers and named
 * blobs of bytes (tensors). CRC-32C checksums cover every byte; the layout is in docs/FORMATS.md.
 * A file gets its name when it is complete and synced, and older ones are removed after that, so
 * the directory always has one to resume from. */
#pragma once

#include "base/status.h"

/* ---- writing ---- */

struct nbi_ckpt_value {
    const char *name;
    bool is_real; /* otherwise an integer */
    int64_t integer;
    double real;
};

static inline struct nbi_ckpt_value nbi_ckpt_int(const char *name, int64_t v)
{
    return (struct nbi_ckpt_value){.name = name, .integer = v};
}

static inline struct nbi_ckpt_value nbi_ckpt_real(const char *name, double v)
{
    return (struct nbi_ckpt_value){.name = name, .is_real = true, .real = v};
}

struct nbi_ckpt_blob {
    const char *name;
    uint64_t bytes;
    const void *memory; /* NULL: the get callback supplies the bytes */
};

/* Fills dst with len bytes of blob [index] from offset on. Offsets ascend without gaps. */
typedef enum nb_status (*nbi_ckpt_get_fn)(void *ctx, size_t index, uint64_t offset, void *dst,
                                          size_t len);

/* What a checkpoint holds; all borrowed. Names are 1 to NBI_CKPT_NAME_MAX bytes of printable text,
 * unique among the values and unique among the blobs. */
struct nbi_ckpt_content {
    uint64_t step;
    const char *settings; /* one JSON value */
    const struct nbi_ckpt_value *values;
    size_t value_count;
    const struct nbi_ckpt_blob *blobs;
    size_t blob_count;
    nbi_ckpt_get_fn get; /* NULL if all blobs are in memory */
    void *ctx;
    bool overlap; /* get is slow: another thread calls it while a piece is written */
};

#define NBI_CKPT_NAME_MAX     255
#define NBI_CKPT_VALUES_MAX   4096
#define NBI_CKPT_BLOBS_MAX    65536
#define NBI_CKPT_SETTINGS_MAX ((size_t)16 << 20)
#define NBI_CKPT_STEP_MAX     ((uint64_t)1 << 48)

/* Writes content to a file that appears complete or not at all. */
enum nb_status nbi_checkpoint_write(const char *path, const struct nbi_ckpt_content *content);

/* Writes content to step-*.ckpt in dir, and makes dir if its parent exists. Then removes all
 * checkpoints up to this step but the last `keep` (at least 1), and temporary files of writers that
 * were killed. Checkpoints of later steps stay: callers refuse to start a new run in a directory
 * that has checkpoints. The space is reserved first; a failure leaves all other files as they are.
 * Memory: 2 MiB, only if blobs come from the callback. */
enum nb_status nbi_checkpoint_save(const char *dir, int keep,
                                   const struct nbi_ckpt_content *content);

/* Writes content to good.ckpt in dir, replacing the previous one, and removes nothing else. */
enum nb_status nbi_checkpoint_save_accepted(const char *dir,
                                            const struct nbi_ckpt_content *content);

/* The exclusive right to write checkpoints in dir, which must exist. The lock ends with
 * nbi_checkpoint_unlock or with the process, however that ends. While another process has it,
 * locking fails with NB_EIO and names that process. On file systems without locks it always
 * succeeds. The file 'lock' stays in the directory. */
struct nbi_ckpt_lock;

enum nb_status nbi_checkpoint_lock(struct nbi_ckpt_lock **out, const char *dir);
void nbi_checkpoint_unlock(struct nbi_ckpt_lock *lock); /* NULL is fine */

/* ---- reading ---- */

struct nbi_checkpoint;

/* Reads and checks everything except the bytes of the blobs. */
enum nb_status nbi_checkpoint_open(struct nbi_checkpoint **out, const char *path);

/* The same from borrowed memory. */
enum nb_status nbi_checkpoint_open_memory(struct nbi_checkpoint **out, const void *bytes,
                                          size_t len);
void nbi_checkpoint_close(struct nbi_checkpoint *c); /* NULL is fine */

/* Reads all blobs and compares their checksums. The message names the first damaged one. */
enum nb_status nbi_checkpoint_verify(const struct nbi_checkpoint *c);

/* Opens the newest checkpoint in dir that passes nbi_checkpoint_verify; a warning in the log says
 * what is wrong with each newer one. NB_ENOTFOUND: no checkpoints, or no directory. NB_EFORMAT: no
 * checkpoint is usable. */
enum nb_status nbi_checkpoint_latest(struct nbi_checkpoint **out, const char *dir);

/* Opens and verifies good.ckpt, which must be of this step. */
enum nb_status nbi_checkpoint_accepted(struct nbi_checkpoint **out, const char *dir, uint64_t step);

/* Number of files named like checkpoints, intact or not; 0 also without a directory. */
size_t nbi_checkpoint_count(const char *dir);

const char *nbi_checkpoint_path(const struct nbi_checkpoint *c);
uint64_t nbi_checkpoint_step(const struct nbi_checkpoint *c);
const char *nbi_checkpoint_settings(const struct nbi_checkpoint *c);

/* A number by its name. NB_EFORMAT: it is missing or of the other kind. */
enum nb_status nbi_checkpoint_int(const struct nbi_checkpoint *c, const char *name, int64_t *v);
enum nb_status nbi_checkpoint_real(const struct nbi_checkpoint *c, const char *name, double *v);

size_t nbi_checkpoint_blob_count(const struct nbi_checkpoint *c);

/* Name and size of a blob; its memory is NULL. The name lives as long as c. */
struct nbi_ckpt_blob nbi_checkpoint_blob(const struct nbi_checkpoint *c, size_t index);

/* Reads a blob into the caller's memory, or passes it to put piece by piece in order. The blob must
 * exist and have that many bytes. Its checksum is known only at the end: after a failure the target
 * may hold damaged bytes. */
enum nb_status nbi_checkpoint_read(const struct nbi_checkpoint *c, const char *name, void *dst,
                                   uint64_t bytes);

typedef enum nb_status (*nbi_ckpt_put_fn)(void *ctx, uint64_t offset, const void *src, size_t len);

enum nb_status nbi_checkpoint_stream(const struct nbi_checkpoint *c, const char *name,
                                     uint64_t bytes, nbi_ckpt_put_fn put, void *ctx);
