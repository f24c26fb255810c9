/* store.h - one view of every weights file: named tensors, wherever their bytes lie.
 *
 * in : a `.dat`, `.safetensors` or `.gguf` file, or a directory of them
 * out: entries under the names of the file; the two to four stored parts of an NVFP4 weight are one
 *      entry, and reading it gives codes and block scales in the order of tensor/nvfp4.h
 *
 * Opening reads headers only and checks all of them: afterwards every span lies inside its file and
 * every size fits its shape. Values are read on demand; reading is thread-safe. */
#pragma once

#include "base/arena.h"
#include "base/file.h"
#include "tensor/dtype.h"

enum nbi_format { NBI_FORMAT_DAT, NBI_FORMAT_SAFETENSORS, NBI_FORMAT_GGUF };

/* How the parts of an NVFP4 tensor are named and ordered. */
enum nbi_layout {
    NBI_LAYOUT_NONE,               /* no NVFP4 tensor */
    NBI_LAYOUT_DAT,                /* NAME.qdata, NAME.scale, perhaps NAME.tscale */
    NBI_LAYOUT_MODELOPT,           /* X.weight, X.weight_scale, X.weight_scale_2 (a factor) */
    NBI_LAYOUT_COMPRESSED_TENSORS, /* X.weight_packed, .weight_scale, .weight_global_scale (divisor)
                                    */
    NBI_LAYOUT_GGUF                /* 64-value blocks with their scales inside */
};

struct nbi_span {
    int file; /* index into the store's files */
    uint64_t offset, bytes;
};

struct nbi_entry {
    const char *name;
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    int64_t count; /* product of shape */
    struct nbi_span data;
    /* NVFP4 only */
    struct nbi_span scale; /* unused in GGUF */
    enum nbi_dtype scale_dtype;
    float tensor_scale;
    float divisor;  /* what compressed-tensors stores; 0 elsewhere */
    bool two_level; /* a tensor scale other than 1, or in a `.dat` or GGUF any */
    uint64_t tensor_scale_bytes;
};

/* One metadata value of a GGUF file: where it lies, not what it is. */
struct nbi_gguf_value {
    const char *key;
    uint32_t type; /* GGUF value type; for arrays that of the elements */
    bool array;
    uint64_t count;         /* elements; 1 for a scalar */
    uint64_t offset, bytes; /* of the first element, and of all */
};

struct nbi_meta_row {
    const char *key, *value;
};

struct nbi_store {
    enum nbi_format format;
    enum nbi_layout layout;
    struct nbi_arena arena; /* entries, names, metadata */
    struct nbi_source **files;
    int file_count;
    size_t file_capacity;
    struct nbi_entry *entries; /* in file order */
    int64_t count;
    struct nbi_entry **by_name; /* sorted */
    struct nbi_gguf_value *kv;  /* GGUF */
    int64_t kv_count;
    struct nbi_meta_row *meta; /* for display, all formats */
    int64_t meta_count;
    size_t meta_capacity;
};

enum nb_status nbi_store_open(struct nbi_store **out, const char *path);
void nbi_store_close(struct nbi_store *store);

/* A single file of this format under any name. */
enum nb_status nbi_store_open_as(struct nbi_store **out, enum nbi_format format, const char *path);

/* A file's bytes in memory (borrowed), for tests and fuzzing. */
enum nb_status nbi_store_open_memory(struct nbi_store **out, enum nbi_format format,
                                     const void *bytes, size_t len);

/* Writes into out, of size bytes, what name is called elsewhere; false: it has no other name. */
typedef bool (*nbi_name_fn)(const char *name, char *out, size_t size);

/* Gives entries other names, as far as translate knows one. */
enum nb_status nbi_store_rename(struct nbi_store *store, nbi_name_fn translate);

const struct nbi_entry *nbi_store_find(const struct nbi_store *store, const char *name);
uint64_t nbi_entry_bytes(const struct nbi_entry *e); /* stored bytes of all parts */

/* Elements [first, first + count) as stored; not for NVFP4. */
enum nb_status nbi_store_read(const struct nbi_store *store, const struct nbi_entry *e,
                              int64_t first, int64_t count, void *dst);

/* Codes and block scales of [first, first + count), both multiples of 64 or up to the end. Scales
 * stored as f16, bf16 or f32 (old `.dat` files) are given as E4M3 if that is exact, else fail. */
enum nb_status nbi_store_read_nvfp4(const struct nbi_store *store, const struct nbi_entry *e,
                                    int64_t first, int64_t count, uint8_t *codes, uint8_t *scales);

/* Block scales [first, first + count) as f32, of an entry that stores them as floats. */
enum nb_status nbi_store_read_float_scales(const struct nbi_store *store, const struct nbi_entry *e,
                                           int64_t first, int64_t count, float *scales);

/* Any float or NVFP4 entry as f32; same alignment rule for NVFP4. */
enum nb_status nbi_store_read_f32(const struct nbi_store *store, const struct nbi_entry *e,
                                  int64_t first, int64_t count, float *dst);

/* ---- GGUF metadata ---- */

const struct nbi_gguf_value *nbi_gguf_find(const struct nbi_store *store, const char *key);

/* Scalars; NB_ENOTFOUND if absent, NB_EFORMAT if of another type or out of range. */
enum nb_status nbi_gguf_int(const struct nbi_store *store, const char *key, int64_t min,
                            int64_t max, int64_t *v);
enum nb_status nbi_gguf_float(const struct nbi_store *store, const char *key, double *v);
enum nb_status nbi_gguf_bool(const struct nbi_store *store, const char *key, bool *v);

/* The caller frees *text (NUL-terminated). */
enum nb_status nbi_gguf_string(const struct nbi_store *store, const char *key, char **text);

/* Calls fn for every string of an array, in order. text is not NUL-terminated. */
typedef enum nb_status (*nbi_gguf_string_fn)(void *ctx, uint64_t index, const char *text,
                                             size_t len);
enum nb_status nbi_gguf_each_string(const struct nbi_store *store, const char *key,
                                    nbi_gguf_string_fn fn, void *ctx);

/* An array of int32 or uint32; the caller frees *v. */
enum nb_status nbi_gguf_int_array(const struct nbi_store *store, const char *key, int32_t **v,
                                  uint64_t *count);
