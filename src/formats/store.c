/* store.c - opens weights in any format and reads their values. */
#include "formats/store.h"

#include <errno.h>
#include <string.h>

#include "base/array.h"
#include "base/dirs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/str.h"
#include "base/syscall.h"
#include "base/utf8.h"
#include "formats/read.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define MAX_FILES 4096
#define INDEX_MAX ((size_t)256 << 20)

/* ---- formats ---- */

const struct nbi_format_info nbi_formats[NBI_FORMATS] = {
#define X(id, name, ending) [id] = {name, ending},
    NBI_FORMAT_LIST(X)
#undef X
};

const struct nbi_layout_info nbi_layouts[NBI_LAYOUTS] = {
#define X(id, ...) [id] = {__VA_ARGS__},
    NBI_LAYOUT_LIST(X)
#undef X
};

static bool find_format(const char *name, bool (*has_ending)(const char *, const char *),
                        enum nbi_format *format)
{
    for (int i = 0; i < NBI_FORMATS; i++)
        if (has_ending(name, nbi_formats[i].ending)) {
            *format = (enum nbi_format)i;
            return true;
        }
    return false;
}

bool nbi_format_of_path(const char *path, enum nbi_format *format)
{
    return find_format(path, nbi_has_extension, format);
}

bool nbi_format_of_file(const char *name, enum nbi_format *format)
{
    return find_format(name, nbi_ends_with, format);
}

enum nb_status nbi_format_detect(const char *path, enum nbi_format *format)
{
    if (nbi_format_of_path(path, format))
        return NB_OK;
    return nbi_fail(NB_EUNSUPPORTED,
                    "cannot tell what '%s' is: a model is a directory or ends in .dat, "
                    ".safetensors or .gguf",
                    path);
}

bool nbi_is_weight_name(const char *name)
{
    return nbi_ends_with(name, ".weight");
}

size_t nbi_stem_length(const char *name)
{
    return strlen(name) - (nbi_is_weight_name(name) ? strlen(".weight") : 0);
}

/* ---- opening ---- */

void nbi_store_close(struct nbi_store *store)
{
    if (!store)
        return;
    for (int i = 0; i < store->file_count; i++)
        nbi_source_close(store->files[i]);
    free(store->files);
    nbi_arena_release(&store->arena);
    free(store->meta);
    free(store);
}

enum nb_status nbi_meta_add(struct nbi_store *store, const char *key, const char *value)
{
    NBI_TRY(NBI_ARRAY_RESERVE(store->meta, store->meta_capacity, (size_t)store->meta_count + 1,
                              "metadata"));
    char *k, *v, text[256];
    nbi_printable_copy(text, sizeof text, key, strlen(key));
    NBI_TRY(nbi_arena_string(&store->arena, "metadata", text, strlen(text), &k));
    nbi_printable_copy(text, sizeof text, value, strlen(value));
    NBI_TRY(nbi_arena_string(&store->arena, "metadata", text, strlen(text), &v));
    store->meta[store->meta_count++] = (struct nbi_meta_row){k, v};
    return NB_OK;
}

enum nb_status nbi_parts_add(struct nbi_store *store, struct nbi_parts *parts, const char *name,
                             size_t name_len, const struct nbi_part *part)
{
    if (name_len == 0 || name_len > NBI_NAME_MAX || !nbi_utf8_printable(name, name_len))
        return nbi_fail(NB_EFORMAT, "a tensor name of %zu bytes is not printable text", name_len);
    uint64_t size = nbi_source_size(store->files[part->span.file]);
    if (part->span.offset > size || part->span.bytes > size - part->span.offset)
        return nbi_fail(NB_EFORMAT, "tensor '%s' lies outside the file", name);
    if (part->dtype != NBI_NVFP4 && part->span.bytes != nbi_dtype_bytes(part->dtype, part->count))
        return nbi_fail(NB_EFORMAT, "tensor '%s' has %llu bytes, its shape and type need %llu",
                        name, (unsigned long long)part->span.bytes,
                        (unsigned long long)nbi_dtype_bytes(part->dtype, part->count));
    char *copy;
    NBI_TRY(NBI_ARRAY_RESERVE(parts->p, parts->capacity, (size_t)parts->count + 1, "tensor list"));
    NBI_TRY(nbi_arena_string(&store->arena, "names", name, name_len, &copy));
    parts->p[parts->count] = *part;
    parts->p[parts->count++].name = copy;
    return NB_OK;
}

static enum nb_status add_source(struct nbi_store *store, struct nbi_source *src)
{
    enum nb_status rc = NBI_ARRAY_RESERVE(store->files, store->file_capacity,
                                          (size_t)store->file_count + 1, "file list");
    if (rc == NB_OK)
        store->files[store->file_count++] = src;
    else
        nbi_source_close(src);
    return rc;
}

static enum nb_status add_file(struct nbi_store *store, const char *path)
{
    struct nbi_source *src;
    if (store->file_count == MAX_FILES)
        return nbi_fail(NB_EFORMAT, "more than %d files", MAX_FILES);
    NBI_TRY(nbi_source_open(&src, path));
    return add_source(store, src);
}

static enum nb_status read_parts(struct nbi_store *store, int file, struct nbi_parts *parts)
{
    static const nbi_read_header_fn readers[NBI_FORMATS] = {
        [NBI_FORMAT_DAT] = nbi_dat_read_header,
        [NBI_FORMAT_SAFETENSORS] = nbi_safetensors_read_header,
        [NBI_FORMAT_GGUF] = nbi_gguf_read_header,
    };
    return nbi_context(readers[store->format](store, file, parts), "cannot read '%s'",
                       nbi_source_path(store->files[file]));
}

/* Reads the headers of all files, then joins their parts into entries. */
static enum nb_status read_headers(struct nbi_store *store)
{
    struct nbi_parts parts = {0};
    enum nb_status rc = NB_OK;
    for (int i = 0; i < store->file_count && rc == NB_OK; i++)
        rc = read_parts(store, i, &parts);
    if (rc == NB_OK)
        rc = nbi_context(nbi_join_parts(store, &parts), "cannot read '%s'",
                         nbi_source_path(store->files[0]));
    free(parts.p);
    return rc;
}

/* ---- directories ---- */

struct listing {
    char name[NBI_FORMATS][256]; /* the last file of each format */
    int count[NBI_FORMATS];
};

static enum nb_status list_weights(const char *dir, struct listing *list)
{
    memset(list, 0, sizeof *list);
    DIR *d = nbi_sys_opendir(dir);
    if (!d)
        return nbi_fail(NB_EIO, "cannot read directory '%s': %s", dir, strerror(errno));
    const char *name;
    while ((name = nbi_dir_next(d))) {
        if (name[0] == '.')
            continue;
        enum nbi_format format;
        if (!nbi_format_of_file(name, &format))
            continue;
        list->count[format]++;
        snprintf(list->name[format], sizeof list->name[format], "%s", name);
    }
    enum nb_status rc =
        errno ? nbi_fail(NB_EIO, "cannot read directory '%s': %s", dir, strerror(errno)) : NB_OK;
    closedir(d);
    return rc;
}

static enum nb_status add_file_in(struct nbi_store *store, const char *dir, const char *name)
{
    char *path = nbi_path_join(dir, name);
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = add_file(store, path);
    free(path);
    return rc;
}

/* Opens each file that the index names, once. Names with a slash are refused: they could leave the
 * directory. */
static enum nb_status add_shards(struct nbi_store *store, const char *dir, const json_t *map)
{
    const char *tensor;
    json_t *file;
    json_t *seen = json_object();
    enum nb_status rc = seen ? NB_OK : nbi_fail_memory("index", 0);
    json_object_foreach ((json_t *)map, tensor, file) {
        const char *name = json_string_value(file);
        if (rc != NB_OK)
            break;
        enum nbi_format format;
        if (!name || strchr(name, '/') || !nbi_format_of_file(name, &format) ||
            format != NBI_FORMAT_SAFETENSORS)
            rc = nbi_fail(NB_EFORMAT, "'%s' is not in a file of this directory", tensor);
        else if (!json_object_get(seen, name)) {
            rc = json_object_set_new(seen, name, json_true()) == 0
                     ? add_file_in(store, dir, name)
                     : nbi_fail_memory("index", strlen(name));
        }
    }
    json_decref(seen);
    return rc;
}

static enum nb_status check_index(const struct nbi_store *store, const struct nbi_parts *parts,
                                  const json_t *map)
{
    for (int64_t i = 0; i < parts->count; i++) {
        const char *where = json_string_value(json_object_get(map, parts->p[i].name));
        const char *real = nbi_path_base(nbi_source_path(store->files[parts->p[i].span.file]));
        if (!where || strcmp(where, real) != 0)
            return nbi_fail(NB_EFORMAT, "tensor '%s' is in '%s' but not so in the index",
                            parts->p[i].name, real);
    }
    if ((size_t)parts->count != json_object_size(map))
        return nbi_fail(NB_EFORMAT, "the index lists %zu tensors, the files hold %lld",
                        json_object_size(map), (long long)parts->count);
    return NB_OK;
}

static enum nb_status read_sharded(struct nbi_store *store, const char *dir, const json_t *map)
{
    struct nbi_parts parts = {0};
    enum nb_status rc = json_is_object(map)
                            ? add_shards(store, dir, map)
                            : nbi_fail(NB_EFORMAT, "'weight_map' must be an object");
    for (int i = 0; i < store->file_count && rc == NB_OK; i++)
        rc = read_parts(store, i, &parts);
    if (rc == NB_OK && json_object_size(map) == 0)
        rc = nbi_fail(NB_EFORMAT, "the index lists no tensors");
    if (rc == NB_OK)
        rc = check_index(store, &parts, map);
    if (rc == NB_OK)
        rc = nbi_join_parts(store, &parts);
    free(parts.p);
    return rc;
}

static enum nb_status open_sharded(struct nbi_store *store, const char *dir, const char *index_path)
{
    json_t *index = NULL;
    NBI_TRY(nbi_json_read_file(&index, index_path, INDEX_MAX));
    store->format = NBI_FORMAT_SAFETENSORS;
    enum nb_status rc = read_sharded(store, dir, json_object_get(index, "weight_map"));
    json_decref(index);
    return nbi_context(rc, "model '%s'", dir);
}

static enum nb_status open_dir(struct nbi_store *store, const char *dir)
{
    char *index = nbi_path_join(dir, NBI_SHARD_INDEX);
    if (!index)
        return NB_ENOMEM;
    struct listing list;
    bool has_index = nbi_path_exists(index) || errno != ENOENT;
    enum nb_status rc = list_weights(dir, &list);
    int safetensors = list.count[NBI_FORMAT_SAFETENSORS], dat = list.count[NBI_FORMAT_DAT];
    const char *gguf = list.name[NBI_FORMAT_GGUF];
    if (rc == NB_OK && safetensors && dat)
        rc = nbi_fail(NB_EFORMAT, "'%s' holds both '%s' and '%s': name the file to read", dir,
                      list.name[NBI_FORMAT_SAFETENSORS], list.name[NBI_FORMAT_DAT]);
    else if (rc == NB_OK && has_index)
        rc = open_sharded(store, dir, index);
    else if (rc == NB_OK && safetensors + dat == 0)
        rc = nbi_fail(NB_ENOTFOUND, "no weights (*.safetensors or one *.dat) in '%s'%s%s%s", dir,
                      gguf[0] ? "; it holds '" : "", gguf, gguf[0] ? "', name that file" : "");
    else if (rc == NB_OK && safetensors + dat > 1)
        rc = nbi_fail(NB_EFORMAT, "'%s' holds several weights files and no %s: name the file", dir,
                      NBI_SHARD_INDEX);
    else if (rc == NB_OK) {
        store->format = dat ? NBI_FORMAT_DAT : NBI_FORMAT_SAFETENSORS;
        rc = add_file_in(store, dir, list.name[store->format]);
        if (rc == NB_OK)
            rc = read_headers(store);
    }
    free(index);
    return rc;
}

static enum nb_status finish_open(struct nbi_store **out, struct nbi_store *store,
                                  enum nb_status rc)
{
    if (rc == NB_OK)
        *out = store;
    else
        nbi_store_close(store);
    return rc;
}

enum nb_status nbi_store_open(struct nbi_store **out, const char *path)
{
    *out = NULL;
    struct nbi_store *store = calloc(1, sizeof *store);
    if (!store)
        return nbi_fail_memory("store", sizeof *store);
    enum nb_status rc;
    if (nbi_path_is_dir(path)) {
        rc = open_dir(store, path);
    } else if (!nbi_path_exists(path)) {
        rc = nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", path,
                      strerror(errno));
    } else {
        rc = nbi_format_detect(path, &store->format);
        if (rc == NB_OK)
            rc = add_file(store, path);
        if (rc == NB_OK)
            rc = read_headers(store);
    }
    return finish_open(out, store, rc);
}

enum nb_status nbi_store_open_as(struct nbi_store **out, enum nbi_format format, const char *path)
{
    *out = NULL;
    struct nbi_store *store = calloc(1, sizeof *store);
    if (!store)
        return nbi_fail_memory("store", sizeof *store);
    store->format = format;
    enum nb_status rc = add_file(store, path);
    if (rc == NB_OK)
        rc = read_headers(store);
    return finish_open(out, store, rc);
}

enum nb_status nbi_store_open_memory(struct nbi_store **out, enum nbi_format format,
                                     const void *bytes, size_t len)
{
    *out = NULL;
    struct nbi_source *src;
    struct nbi_store *store = calloc(1, sizeof *store);
    if (!store)
        return nbi_fail_memory("store", sizeof *store);
    store->format = format;
    enum nb_status rc = nbi_source_memory(&src, bytes, len);
    if (rc == NB_OK)
        rc = add_source(store, src);
    if (rc == NB_OK)
        rc = read_headers(store);
    return finish_open(out, store, rc);
}

/* ---- finding and reading ---- */

static int find_by_name(const void *key, const void *entry)
{
    return strcmp(key, (*(struct nbi_entry *const *)entry)->name);
}

const struct nbi_entry *nbi_store_find(const struct nbi_store *store, const char *name)
{
    if (store->count == 0)
        return NULL;
    struct nbi_entry *const *e =
        bsearch(name, store->by_name, (size_t)store->count, sizeof *store->by_name, find_by_name);
    return e ? *e : NULL;
}

uint64_t nbi_entry_bytes(const struct nbi_entry *e)
{
    return e->data.bytes + e->scale.bytes + e->tensor_scale_bytes;
}

static void check_range(const struct nbi_entry *e, int64_t first, int64_t count)
{
    NBI_BUG_IF(first < 0 || count < 0 || first > e->count || count > e->count - first);
}

static enum nb_status read_span(const struct nbi_store *store, const struct nbi_span *span,
                                uint64_t at, void *dst, size_t len)
{
    return nbi_source_read(store->files[span->file], span->offset + at, dst, len);
}

enum nb_status nbi_store_read(const struct nbi_store *store, const struct nbi_entry *e,
                              int64_t first, int64_t count, void *dst)
{
    check_range(e, first, count);
    NBI_BUG_IF(e->dtype == NBI_NVFP4);
    uint64_t size = (uint64_t)nbi_dtypes[e->dtype].bytes;
    return read_span(store, &e->data, (uint64_t)first * size, dst, (size_t)count * size);
}

/* Converts float values to f32. y and x are aligned, whatever the offset in the file. */
static void to_f32(float *y, const void *x, enum nbi_dtype dtype, int64_t n)
{
    if (dtype == NBI_BF16)
        nbi_codec_table()->bf16_to_f32(y, x, n);
    else if (dtype == NBI_F16)
        nbi_codec_table()->f16_to_f32(y, x, n);
    else
        memcpy(y, x, (size_t)n * sizeof *y);
}

enum nb_status nbi_store_read_float_scales(const struct nbi_store *store, const struct nbi_entry *e,
                                           int64_t first, int64_t n, float *scales)
{
    size_t size = (size_t)nbi_dtypes[e->scale_dtype].bytes;
    void *raw = malloc((size_t)n * size + 1);
    if (!raw)
        return nbi_fail_memory("block scales", (size_t)n * size);
    enum nb_status rc = read_span(store, &e->scale, (uint64_t)first * size, raw, (size_t)n * size);
    if (rc == NB_OK)
        to_f32(scales, raw, e->scale_dtype, n);
    free(raw);
    return rc;
}

static enum nb_status legacy_to_e4m3(const struct nbi_store *store, const struct nbi_entry *e,
                                     int64_t first, int64_t n, uint8_t *codes)
{
    float *scales = malloc((size_t)n * sizeof *scales + 1);
    if (!scales)
        return nbi_fail_memory("block scales", (size_t)n * sizeof *scales);
    enum nb_status rc = nbi_store_read_float_scales(store, e, first, n, scales);
    for (int64_t i = 0; i < n && rc == NB_OK; i++) {
        codes[i] = nbi_f32_to_e4m3(scales[i]);
        if (nbi_e4m3_to_f32(codes[i]) != scales[i])
            rc = nbi_fail(NB_EVALUE,
                          "block scale %g of '%s' is stored as %s and is not an E4M3 value; "
                          "convert --dtype f32, f16 or bf16 gives the values themselves",
                          (double)scales[i], e->name, nbi_dtypes[e->scale_dtype].name);
    }
    free(scales);
    return rc;
}

static enum nb_status read_gguf_blocks(const struct nbi_store *store, const struct nbi_entry *e,
                                       int64_t first, int64_t count, uint8_t *codes,
                                       uint8_t *scales)
{
    size_t bytes = (size_t)count / 64 * 36;
    uint8_t *blocks = malloc(bytes + 1);
    if (!blocks)
        return nbi_fail_memory("NVFP4 blocks", bytes);
    enum nb_status rc = read_span(store, &e->data, (uint64_t)first / 64 * 36, blocks, bytes);
    if (rc == NB_OK)
        nbi_nvfp4_from_gguf(codes, scales, blocks, count / 64);
    free(blocks);
    return rc;
}

enum nb_status nbi_store_read_nvfp4(const struct nbi_store *store, const struct nbi_entry *e,
                                    int64_t first, int64_t count, uint8_t *codes, uint8_t *scales)
{
    check_range(e, first, count);
    NBI_BUG_IF(e->dtype != NBI_NVFP4 || first % 64 != 0 || count % NBI_NVFP4_BLOCK != 0);
    if (store->layout == NBI_LAYOUT_GGUF)
        return read_gguf_blocks(store, e, first, count, codes, scales);
    int64_t block = first / NBI_NVFP4_BLOCK, n = count / NBI_NVFP4_BLOCK;
    NBI_TRY(read_span(store, &e->data, (uint64_t)first / 2, codes, (size_t)count / 2));
    if (e->scale_dtype == NBI_E4M3)
        return read_span(store, &e->scale, (uint64_t)block, scales, (size_t)n);
    return legacy_to_e4m3(store, e, block, n, scales);
}

/* Dequantises where block scales are floats: with the E4M3 scale 1.0 the codec returns the E2M1
 * values, which the stored scale then multiplies. */
static enum nb_status legacy_to_f32(const struct nbi_store *store, const struct nbi_entry *e,
                                    int64_t first, int64_t count, uint8_t *codes, uint8_t *ones,
                                    float *dst)
{
    int64_t block = first / NBI_NVFP4_BLOCK, n = count / NBI_NVFP4_BLOCK;
    float *scales = malloc((size_t)n * sizeof *scales + 1);
    if (!scales)
        return nbi_fail_memory("block scales", (size_t)n * sizeof *scales);
    enum nb_status rc = read_span(store, &e->data, (uint64_t)first / 2, codes, (size_t)count / 2);
    if (rc == NB_OK)
        rc = nbi_store_read_float_scales(store, e, block, n, scales);
    if (rc == NB_OK) {
        memset(ones, 0x38, (size_t)n);
        nbi_nvfp4_dequantize_f32(dst, codes, ones, n, 1.0f);
        for (int64_t i = 0; i < count; i++)
            dst[i] *= scales[i / NBI_NVFP4_BLOCK] * e->tensor_scale;
    }
    free(scales);
    return rc;
}

static enum nb_status nvfp4_to_f32(const struct nbi_store *store, const struct nbi_entry *e,
                                   int64_t first, int64_t count, float *dst)
{
    size_t n = (size_t)count / NBI_NVFP4_BLOCK;
    uint8_t *codes = malloc(n * 9 + 1), *scales = codes ? codes + n * 8 : NULL;
    if (!codes)
        return nbi_fail_memory("NVFP4 blocks", n * 9);
    enum nb_status rc;
    if (store->layout != NBI_LAYOUT_GGUF && e->scale_dtype != NBI_E4M3) {
        rc = legacy_to_f32(store, e, first, count, codes, scales, dst);
    } else {
        rc = nbi_store_read_nvfp4(store, e, first, count, codes, scales);
        if (rc == NB_OK)
            nbi_nvfp4_dequantize_f32(dst, codes, scales, (int64_t)n, e->tensor_scale);
    }
    free(codes);
    return rc;
}

enum nb_status nbi_store_read_f32(const struct nbi_store *store, const struct nbi_entry *e,
                                  int64_t first, int64_t count, float *dst)
{
    check_range(e, first, count);
    if (e->dtype == NBI_NVFP4)
        return nvfp4_to_f32(store, e, first, count, dst);
    if (e->dtype == NBI_F32)
        return nbi_store_read(store, e, first, count, dst);
    if (!nbi_dtype_is_float(e->dtype))
        return nbi_fail(NB_EUNSUPPORTED, "tensor '%s' has type %s, not a float type", e->name,
                        nbi_dtypes[e->dtype].name);
    uint16_t half[16384]; /* 32 KiB, fits the L1 cache */
    const int64_t chunk = (int64_t)(sizeof half / sizeof *half);
    for (int64_t i = 0; i < count; i += chunk) {
        int64_t n = count - i < chunk ? count - i : chunk;
        NBI_TRY(nbi_store_read(store, e, first + i, n, half));
        to_f32(dst + i, half, e->dtype, n);
    }
    return NB_OK;
}
