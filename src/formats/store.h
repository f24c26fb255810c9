/* store.h - one view of every weights file: named tensors, wherever their bytes are.
 *
 * in : a `.dat`, `.safetensors` or `.gguf` file, or a directory of them
 * out: entries under the names of the file; the one to three stored parts of an NVFP4 weight are
 * one entry, and reading it returns codes and block scales in the order of tensor/nvfp4.h
 *
 * Opening reads headers only and validates them: afterwards every span lies inside its file and
 * every size fits its shape. Values are read on demand; reading is thread-safe. */
#pragma once

#include "base/arena.h"
#include "base/file.h"
#include "nibble/files.h"
#include "tensor/dtype.h"

/* Every file format: id, name, file ending. To add one, add a row here and its functions to the
 * tables in store.c and writer.c. */
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

/* Finds the format by a path's ending, ignoring case; false: no format has it. */
bool nbi_format_of_path(const char *path, enum nbi_format *format);

/* The same for a file listed in a directory, where only lower-case endings count. */
bool nbi_format_of_file(const char *name, enum nbi_format *format);

/* As nbi_format_of_path; NB_EUNSUPPORTED if no format has the ending. */
enum nb_status nbi_format_detect(const char *path, enum nbi_format *format);

/* The file that lists the shards of a safetensors model, next to them. */
#define NBI_SHARD_INDEX "model.safetensors.index.json"

/* How the stored tensors of an NVFP4 weight are named: id, name, format, then the suffixes of
 * codes, block scales and tensor scale. A suffix replaces the ".weight" of the weight's name; in a
 * `.dat` it follows the whole name. compressed-tensors stores the reciprocal of the tensor scale.
 * GGUF stores blocks of 64 values together with their block scales. */
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
    int file; /* index into store->files */
    uint64_t offset, bytes;
};

struct nbi_entry {
    const char *name;
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    int64_t count; /* product of shape */
    struct nbi_span data;
    /* The fields below are for NVFP4 only. */
    struct nbi_span scale; /* unused in GGUF */
    enum nbi_dtype scale_dtype;
    float tensor_scale;
    float divisor; /* as compressed-tensors stores it; else 0 */
    /* A tensor scale other than 1; in a `.dat` or GGUF, any tensor scale. */
    bool two_level;
    uint64_t tensor_scale_bytes;
};

/* A metadata value of a GGUF file: where it is stored, not its contents. */
struct nbi_gguf_value {
    const char *key;
    uint32_t type; /* GGUF value type; of the elements for an array */
    bool array;
    uint64_t count;         /* elements; 1 for a scalar */
    uint64_t offset, bytes; /* of the first element; of all elements */
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
    struct nbi_entry **by_name;  /* sorted */
    struct nbi_gguf_value *gguf; /* GGUF only */
    int64_t gguf_count;
    struct nbi_meta_row *meta; /* for display; all formats */
    int64_t meta_count;
    size_t meta_capacity;
};

enum nb_status nbi_store_open(struct nbi_store **out, const char *path);
void nbi_store_close(struct nbi_store *store);

/* Opens a single file of this format, whatever its name. */
enum nb_status nbi_store_open_as(struct nbi_store **out, enum nbi_format format, const char *path);

/* Reads from memory (borrowed) instead of a file, for tests and fuzzing. */
enum nb_status nbi_store_open_memory(struct nbi_store **out, enum nbi_format format,
                                     const void *bytes, size_t len);

/* Translates a tensor's name into out, of size bytes; false: it has no other name. */
typedef bool (*nbi_name_fn)(const char *name, char *out, size_t size);

/* Renames the entries that translate knows. */
enum nb_status nbi_store_rename(struct nbi_store *store, nbi_name_fn translate);

const struct nbi_entry *nbi_store_find(const struct nbi_store *store, const char *name);
uint64_t nbi_entry_bytes(const struct nbi_entry *e); /* stored bytes, all parts */

/* Reads elements [first, first + count) as stored; not for NVFP4. */
enum nb_status nbi_store_read(const struct nbi_store *store, const struct nbi_entry *e,
                              int64_t first, int64_t count, void *dst);

/* Reads codes and block scales of elements [first, first + count). first is a multiple of 64, count
 * too unless the range ends the tensor. Block scales stored as f16, bf16 or f32 (old `.dat` files)
 * are converted to E4M3; NB_EVALUE if that is not exact. */
enum nb_status nbi_store_read_nvfp4(const struct nbi_store *store, const struct nbi_entry *e,
                                    int64_t first, int64_t count, uint8_t *codes, uint8_t *scales);

/* Reads block scales [first, first + count) as f32, of an entry that stores them as floats. */
enum nb_status nbi_store_read_float_scales(const struct nbi_store *store, const struct nbi_entry *e,
                                           int64_t first, int64_t count, float *scales);

/* Reads elements of any float or NVFP4 entry as f32, with the same alignment rule for NVFP4. */
enum nb_status nbi_store_read_f32(const struct nbi_store *store, const struct nbi_entry *e,
                                  int64_t first, int64_t count, float *dst);

/* ---- GGUF metadata ---- */

const struct nbi_gguf_value *nbi_gguf_find(const struct nbi_store *store, const char *key);

/* Scalars. NB_ENOTFOUND if absent, NB_EFORMAT if of another type or out of range. */
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
