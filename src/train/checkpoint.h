/* checkpoint.h - the state of a training run in one file, and the files of a directory.
 *
 * A checkpoint `step-00000120.ckpt` holds the settings as JSON, the step, named numbers (cursors,
 * random state, sums) and named blobs of bytes (tensors). Every byte of it is under a CRC-32C; the
 * layout is in docs/FORMATS.md. It appears under its name when it is complete and synced, older
 * ones go after that, so at each moment there is one to go on from. */
#pragma once

#include "base/status.h"

/* ---- writing ---- */

struct nbi_ckpt_value {
    const char *name;
    bool is_real; /* else whole */
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
    const void *memory; /* NULL: it comes through the callback */
};

/* Fills dst with len bytes of blob [index] from offset on. Called from front to back. */
typedef enum nb_status (*nbi_ckpt_get_fn)(void *ctx, size_t index, uint64_t offset, void *dst,
                                          size_t len);

/* What a checkpoint holds; all of it borrowed. Names are 1 to NBI_CKPT_NAME_MAX bytes of printable
 * text, different from each other among the values and among the blobs. */
struct nbi_ckpt_content {
    uint64_t step;
    const char *settings; /* one JSON value */
    const struct nbi_ckpt_value *values;
    size_t value_count;
    const struct nbi_ckpt_blob *blobs;
    size_t blob_count;
    nbi_ckpt_get_fn get; /* NULL if all blobs are in memory */
    void *ctx;
};

#define NBI_CKPT_NAME_MAX     255
#define NBI_CKPT_VALUES_MAX   4096
#define NBI_CKPT_BLOBS_MAX    65536
#define NBI_CKPT_SETTINGS_MAX ((size_t)16 << 20)
#define NBI_CKPT_STEP_MAX     ((uint64_t)1 << 48)

/* Writes content to a file that appears complete or not at all. */
enum nb_status nbi_checkpoint_write(const char *path, const struct nbi_ckpt_content *content);

/* Writes content to its file in dir, which is made if only its last name is missing. Then of the
 * checkpoints up to this step all but the last `keep` (at least 1) are removed, and so is what
 * killed writers left. Those of later steps stay: a run that starts anew in a directory with
 * checkpoints is for the caller to refuse. The space is reserved first; a failure leaves all
 * others as they were. Memory: one buffer of 1 MiB, only if blobs come through the callback. */
enum nb_status nbi_checkpoint_save(const char *dir, int keep,
                                   const struct nbi_ckpt_content *content);

/* The same under the name good.ckpt, in place of the one before; none is removed for it. */
enum nb_status nbi_checkpoint_save_accepted(const char *dir,
                                            const struct nbi_ckpt_content *content);

/* The right to write in dir, which is there: one process has it at a time, until it closes it or
 * ends, however it ends. NB_EIO names the one that has it. Where the file system has no locks,
 * everybody has. The file 'lock' stays. */
struct nbi_ckpt_lock;

enum nb_status nbi_checkpoint_lock(struct nbi_ckpt_lock **out, const char *dir);
void nbi_checkpoint_unlock(struct nbi_ckpt_lock *lock); /* NULL is fine */

/* ---- reading ---- */

struct nbi_checkpoint;

/* Reads and checks everything but the bytes of the blobs. */
enum nb_status nbi_checkpoint_open(struct nbi_checkpoint **out, const char *path);

/* The same over borrowed memory. */
enum nb_status nbi_checkpoint_open_memory(struct nbi_checkpoint **out, const void *bytes,
                                          size_t len);
void nbi_checkpoint_close(struct nbi_checkpoint *c); /* NULL is fine */

/* Reads all blobs and compares their checksums; the message names the first that is damaged. */
enum nb_status nbi_checkpoint_verify(const struct nbi_checkpoint *c);

/* Opens the newest checkpoint in dir that is whole (verified). For each newer one that is not, a
 * warning in the log says what is wrong. NB_ENOTFOUND: there is none at all, or no directory;
 * NB_EFORMAT: none of those there are is usable. */
enum nb_status nbi_checkpoint_latest(struct nbi_checkpoint **out, const char *dir);

/* good.ckpt, verified, if it is that of this step. */
enum nb_status nbi_checkpoint_accepted(struct nbi_checkpoint **out, const char *dir, uint64_t step);

/* How many there are by their names, whole or not; 0 also without a directory. */
size_t nbi_checkpoint_count(const char *dir);

const char *nbi_checkpoint_path(const struct nbi_checkpoint *c);
uint64_t nbi_checkpoint_step(const struct nbi_checkpoint *c);
const char *nbi_checkpoint_settings(const struct nbi_checkpoint *c);

/* A number by its name; one that is not there, or of the other kind, is NB_EFORMAT. */
enum nb_status nbi_checkpoint_int(const struct nbi_checkpoint *c, const char *name, int64_t *v);
enum nb_status nbi_checkpoint_real(const struct nbi_checkpoint *c, const char *name, double *v);

size_t nbi_checkpoint_blob_count(const struct nbi_checkpoint *c);

/* The blob at index, without its memory; the name lives as long as c. */
struct nbi_ckpt_blob nbi_checkpoint_blob(const struct nbi_checkpoint *c, size_t index);

/* A blob into memory of the caller's, or piece by piece from front to back. It must be there and
 * have that many bytes. The checksum is known at the end: after a failure the target holds
 * anything. */
enum nb_status nbi_checkpoint_read(const struct nbi_checkpoint *c, const char *name, void *dst,
                                   uint64_t bytes);

typedef enum nb_status (*nbi_ckpt_put_fn)(void *ctx, uint64_t offset, const void *src, size_t len);

enum nb_status nbi_checkpoint_stream(const struct nbi_checkpoint *c, const char *name,
                                     uint64_t bytes, nbi_ckpt_put_fn put, void *ctx);
