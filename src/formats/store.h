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

/* Every file format: id, name, file ending. */
#define NBI_FORMAT_LIST(X)                                                                         \
    X(NBI_FORMAT_DAT, "dat", ".dat")                                                               \
    X(NBI_FORMAT_GGUF, "gguf", ".gguf")                                                            \
    X(NBI_FORMAT_SAFETENSORS, "safetensors", ".safetensors")

enum nbi_format {
#define X(id, name, ending) id,
    NBI_FORMAT_LIST(X)
#undef X
        NBI_FORMATS
};

struct nbi_format_info {
    const char *name, *ending;
};

extern const struct nbi_format_info nbi_formats[NBI_FORMATS];

/* Finds the format whose ending a path has, in any case; false: none. */
bool nbi_format_of_path(const char *path, enum nbi_format *format);

/* The same for a file's name in a directory, where only the lower-case ending counts. */
bool nbi_format_of_file(const char *name, enum nbi_format *format);

/* As nbi_format_of_path; NB_EUNSUPPORTED where it returns false. */
enum nb_status nbi_format_detect(const char *path, enum nbi_format *format);

/* Lists the shards of a safetensors model, in its directory. */
#define NBI_SHARD_INDEX "model.safetensors.index.json"

/* How the stored tensors of one NVFP4 weight are named and ordered: id, name, format, then the
 * suffixes of codes, block scales and tensor scale. A suffix replaces the ".weight" of the weight's
 * name; in a `.dat` it follows the whole name. compressed-tensors stores the reciprocal of the
 * tensor scale. GGUF has blocks of 64 values with their scales inside. */
#define NBI_LAYOUT_LIST(X)                                                                         \
    X(NBI_LAYOUT_NONE, "none", NBI_FORMATS, NULL, NULL, NULL) /* no NVFP4 tensor */                \
    X(NBI_LAYOUT_DAT, "dat", NBI_FORMAT_DAT, ".qdata", ".scale", ".tscale")                        \
    X(NBI_LAYOUT_MODELOPT, "modelopt", NBI_FORMAT_SAFETENSORS, ".weight", ".weight_scale",         \
      ".weight_scale_2")                                                                           \
    X(NBI_LAYOUT_COMPRESSED_TENSORS, "compressed-tensors", NBI_FORMAT_SAFETENSORS,                 \
      ".weight_packed", ".weight_scale", ".weight_global_scale")                                   \
    X(NBI_LAYOUT_GGUF, "gguf", NBI_FORMAT_GGUF, ".weight", NULL, ".scale")

enum nbi_layout {
#define X(id, ...) id,
    NBI_LAYOUT_LIST(X)
#undef X
        NBI_LAYOUTS
};

struct nbi_layout_info {
    const char *name;
    enum nbi_format format;
    const char *codes, *block_scales, *tensor_scale;
};

extern const struct nbi_layout_info nbi_layouts[NBI_LAYOUTS];

/* Length of a tensor's name without a final ".weight". */
size_t nbi_stem_length(const char *name);
bool nbi_is_weight_name(const char *name);

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
