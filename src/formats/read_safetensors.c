/* read_safetensors.c - reader of one `.safetensors` file: a length, a JSON header, a byte buffer.
 *
 * The header must describe the buffer completely: sorted by offset, the tensors follow one another
 * without gap or overlap, from the first byte to the last. */
#include <string.h>

#include "base/json.h"
#include "formats/read.h"

#define HEADER_MAX 100000000ull /* the format's own limit */

static enum nb_status parse_dtype(const char *text, enum nbi_dtype *dtype)
{
    for (int d = 0; d < NBI_DTYPES; d++)
        if (nbi_dtypes[d].safetensors && strcmp(nbi_dtypes[d].safetensors, text) == 0) {
            *dtype = (enum nbi_dtype)d;
            return NB_OK;
        }
    return nbi_fail(NB_EUNSUPPORTED, "element type '%s' is not supported", text);
}

static enum nb_status parse_shape(const json_t *shape, struct nbi_part *part)
{
    if (!json_is_array(shape) || json_array_size(shape) > NB_MAX_DIMS)
        return nbi_fail(NB_EFORMAT, "'shape' must be a list of at most %d numbers", NB_MAX_DIMS);
    part->ndim = (int)json_array_size(shape);
    for (int i = 0; i < part->ndim; i++) {
        const json_t *dim = json_array_get(shape, (size_t)i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return nbi_fail(NB_EFORMAT, "dimension %d is not a whole number >= 0", i);
        part->shape[i] = json_integer_value(dim);
    }
    return nbi_count(part->shape, part->ndim, &part->count);
}

/* Parses [begin, end], relative to the buffer of data_bytes at data_at. */
static enum nb_status parse_offsets(const json_t *offsets, uint64_t data_at, uint64_t data_bytes,
                                    struct nbi_part *part)
{
    const json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(e))
        return nbi_fail(NB_EFORMAT, "'data_offsets' must be two whole numbers");
    int64_t begin = json_integer_value(b), end = json_integer_value(e);
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes)
        return nbi_fail(NB_EFORMAT, "data at %lld to %lld, but the buffer has %llu bytes",
                        (long long)begin, (long long)end, (unsigned long long)data_bytes);
    part->span.offset = data_at + (uint64_t)begin;
    part->span.bytes = (uint64_t)(end - begin);
    return NB_OK;
}

static enum nb_status parse_tensor(const json_t *info, uint64_t data_at, uint64_t data_bytes,
                                   struct nbi_part *part)
{
    const char *dtype;
    if (!json_is_object(info) || json_object_size(info) != 3)
        return nbi_fail(NB_EFORMAT, "must have dtype, shape and data_offsets and nothing else");
    NBI_TRY(nbi_json_string(info, "dtype", true, &dtype));
    NBI_TRY(parse_dtype(dtype, &part->dtype));
    NBI_TRY(parse_shape(json_object_get(info, "shape"), part));
    return parse_offsets(json_object_get(info, "data_offsets"), data_at, data_bytes, part);
}

static enum nb_status parse_metadata(struct nbi_store *store, const json_t *meta)
{
    const char *key;
    json_t *value;
    if (!json_is_object(meta))
        return nbi_fail(NB_EFORMAT, "'__metadata__' must be an object");
    json_object_foreach ((json_t *)meta, key, value) {
        if (!json_is_string(value))
            return nbi_fail(NB_EFORMAT, "metadata '%s' must be a string", key);
        NBI_TRY(nbi_meta_add(store, key, json_string_value(value)));
    }
    return NB_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct nbi_part *x = a, *y = b;
    if (x->span.offset != y->span.offset)
        return x->span.offset < y->span.offset ? -1 : 1;
    return (x->span.bytes > y->span.bytes) - (x->span.bytes < y->span.bytes);
}

/* Checks that this file's parts, from `first` on, fill [at, end). */
static enum nb_status check_cover(struct nbi_parts *parts, int64_t first, uint64_t at, uint64_t end)
{
    if (parts->count > first)
        qsort(parts->p + first, (size_t)(parts->count - first), sizeof *parts->p, by_offset);
    for (int64_t i = first; i < parts->count; i++) {
        const struct nbi_part *part = &parts->p[i];
        if (part->span.offset != at)
            return nbi_fail(NB_EFORMAT, "the data of '%s' %s", part->name,
                            part->span.offset < at ? "overlaps that of another tensor"
                                                   : "does not follow that of the one before");
        at += part->span.bytes;
    }
    if (at != end)
        return nbi_fail(NB_EFORMAT, "%llu bytes after the last tensor",
                        (unsigned long long)(end - at));
    return NB_OK;
}

static enum nb_status parse_header(struct nbi_store *store, int file, struct nbi_parts *parts,
                                   const json_t *header, uint64_t data_at)
{
    uint64_t size = nbi_source_size(store->files[file]);
    int64_t first = parts->count;
    const char *name;
    json_t *info;
    if (!json_is_object(header))
        return nbi_fail(NB_EFORMAT, "the header is not a JSON object");
    json_object_foreach ((json_t *)header, name, info) {
        if (strcmp(name, "__metadata__") == 0) {
            NBI_TRY(parse_metadata(store, info));
            continue;
        }
        struct nbi_part part = {.span = {.file = file}};
        NBI_TRY(
            nbi_context(parse_tensor(info, data_at, size - data_at, &part), "tensor '%s'", name));
        NBI_TRY(nbi_parts_add(store, parts, name, strlen(name), &part));
    }
    return check_cover(parts, first, data_at, size);
}

enum nb_status nbi_safetensors_read_header(struct nbi_store *store, int file,
                                           struct nbi_parts *parts)
{
    struct nbi_cursor c;
    uint64_t n;
    nbi_cursor_init(&c, store->files[file]);
    NBI_TRY(nbi_cursor_u64(&c, &n));
    /* Compared with the bytes left: the file chooses n, and 8 + n could wrap. */
    if (n > HEADER_MAX || n > nbi_cursor_left(&c))
        return nbi_fail(NB_EFORMAT, "the header claims %llu bytes, %llu are left (limit %llu)",
                        (unsigned long long)n, (unsigned long long)nbi_cursor_left(&c), HEADER_MAX);
    char *text = malloc(n + 1);
    if (!text)
        return nbi_fail_memory("safetensors header", n);
    enum nb_status rc = nbi_cursor_bytes(&c, text, n);
    size_t len = n;
    while (rc == NB_OK && len > 0 && text[len - 1] == ' ')
        len--; /* the only padding allowed; the JSON parser refuses anything else */
    if (rc == NB_OK && (len < 2 || text[0] != '{' || text[len - 1] != '}'))
        rc = nbi_fail(NB_EFORMAT, "the header does not start with '{' and end with '}'");
    json_t *header = NULL;
    if (rc == NB_OK)
        rc = nbi_context(nbi_json_parse(&header, text, len), "header");
    free(text);
    if (rc == NB_OK)
        rc = parse_header(store, file, parts, header, 8 + n);
    json_decref(header);
    return rc;
}
