/* read_gguf.c - reader of GGUF version 3: metadata, tensor table, aligned data.
 *
 * No allocation is sized by a count in the header: arrays grow as entries are found. Metadata
 * values stay in the file; the store keeps their type and position, and callers read those they
 * need. */
#include "formats/gguf.h"

#include <inttypes.h>
#include <string.h>

#include "base/array.h"
#include "base/crc.h"
#include "base/str.h"
#include "base/utf8.h"
#include "formats/read.h"
#include "tensor/nvfp4.h"

#define MAX_ALIGNMENT    (1u << 20)
#define MIN_VALUE_BYTES  13 /* empty key, type, one byte */
#define MIN_TENSOR_BYTES 24 /* empty name, no dimensions, type, offset */

static const uint8_t type_bytes[NBI_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* ---- metadata ---- */

/* Reads a length-prefixed string of at most max bytes into buf (max + 1 bytes), NUL-terminated. */
static enum nb_status read_string(struct nbi_cursor *c, char *buf, size_t max, size_t *len)
{
    uint64_t n;
    NBI_TRY(nbi_cursor_u64(c, &n));
    if (n > max)
        return nbi_fail(NB_EFORMAT, "a name of %" PRIu64 " bytes at offset %" PRIu64, n, c->pos);
    NBI_TRY(nbi_cursor_bytes(c, buf, n));
    buf[n] = 0;
    *len = (size_t)n;
    return NB_OK;
}

static enum nb_status skip_string(struct nbi_cursor *c)
{
    uint64_t n;
    NBI_TRY(nbi_cursor_u64(c, &n));
    return nbi_cursor_skip(c, n);
}

/* Skips `count` values of a type. */
static enum nb_status skip_values(struct nbi_cursor *c, uint32_t type, uint64_t count)
{
    if (type == NBI_GGUF_STRING) {
        if (count > nbi_cursor_left(c) / 8)
            return nbi_fail(NB_EFORMAT, "an array of %" PRIu64 " strings, %" PRIu64 " bytes left",
                            count, nbi_cursor_left(c));
        for (uint64_t i = 0; i < count; i++)
            NBI_TRY(skip_string(c));
        return NB_OK;
    }
    if (count > nbi_cursor_left(c) / type_bytes[type])
        return nbi_fail(NB_EFORMAT, "an array of %" PRIu64 " values, %" PRIu64 " bytes left", count,
                        nbi_cursor_left(c));
    return nbi_cursor_skip(c, count * type_bytes[type]);
}

static enum nb_status read_value(struct nbi_store *store, struct nbi_cursor *c,
                                 struct nbi_gguf_value *value)
{
    char key[NBI_NAME_MAX + 1], *copy;
    size_t len;
    NBI_TRY(read_string(c, key, NBI_NAME_MAX, &len));
    if (len == 0 || !nbi_utf8_printable(key, len))
        return nbi_fail(NB_EFORMAT, "a metadata key is not text");
    NBI_TRY(nbi_arena_string(&store->arena, "metadata", key, len, &copy));
    value->key = copy;
    value->count = 1;
    NBI_TRY(nbi_cursor_u32(c, &value->type));
    if (value->type == NBI_GGUF_ARRAY) {
        value->array = true;
        NBI_TRY(nbi_cursor_u32(c, &value->type));
        NBI_TRY(nbi_cursor_u64(c, &value->count));
    }
    if (value->type == NBI_GGUF_ARRAY)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is an array of arrays, which is not supported",
                        key);
    if (value->type >= NBI_GGUF_TYPES)
        return nbi_fail(NB_EFORMAT, "metadata '%s' has unsupported type %" PRIu32, key,
                        value->type);
    value->offset = c->pos;
    NBI_TRY(nbi_context(skip_values(c, value->type, value->count), "metadata '%s'", key));
    value->bytes = c->pos - value->offset;
    return NB_OK;
}

static enum nb_status describe_scalar(const struct nbi_store *store,
                                      const struct nbi_gguf_value *value, char *text, size_t size)
{
    int64_t i;
    double f;
    bool b;
    if (value->type == NBI_GGUF_BOOL) {
        NBI_TRY(nbi_gguf_bool(store, value->key, &b));
        snprintf(text, size, "%s", b ? "true" : "false");
    } else if (value->type == NBI_GGUF_F32 || value->type == NBI_GGUF_F64) {
        NBI_TRY(nbi_gguf_float(store, value->key, &f));
        snprintf(text, size, "%.9g", f);
    } else {
        NBI_TRY(nbi_gguf_int(store, value->key, INT64_MIN, INT64_MAX, &i));
        snprintf(text, size, "%" PRId64, i);
    }
    return NB_OK;
}

/* Adds a short text of a value to the metadata for display. */
static enum nb_status describe_value(struct nbi_store *store, const struct nbi_gguf_value *value)
{
    static const char *const names[NBI_GGUF_TYPES] = {"u8",  "i8",  "u16",  "i16",    "u32",
                                                      "i32", "f32", "bool", "string", "array",
                                                      "u64", "i64", "f64"};
    char text[96];
    if (value->array) {
        snprintf(text, sizeof text, "%" PRIu64 " x %s", value->count, names[value->type]);
    } else if (value->type == NBI_GGUF_STRING) {
        char buf[sizeof text + 4]; /* longer than text, so that truncation shows */
        uint64_t n = value->bytes - 8 < sizeof buf ? value->bytes - 8 : sizeof buf;
        NBI_TRY(nbi_source_read(store->files[0], value->offset + 8, buf, n));
        nbi_printable_copy(text, sizeof text, buf, n);
    } else {
        enum nb_status rc = describe_scalar(store, value, text, sizeof text);
        if (rc == NB_EFORMAT) /* not a value of its type: an error only for callers that need it */
            snprintf(text, sizeof text, "(%s)", names[value->type]);
        else if (rc != NB_OK)
            return rc;
    }
    return nbi_meta_add(store, value->key, text);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const struct nbi_gguf_value *)a)->key, ((const struct nbi_gguf_value *)b)->key);
}

static enum nb_status read_metadata(struct nbi_store *store, struct nbi_cursor *c, uint64_t n)
{
    struct nbi_gguf_value *list = NULL;
    size_t capacity = 0, used = 0;
    enum nb_status rc = NB_OK;
    for (uint64_t i = 0; i < n && rc == NB_OK; i++) {
        rc = NBI_ARRAY_RESERVE(list, capacity, used + 1, "metadata");
        if (rc != NB_OK)
            break;
        list[used] = (struct nbi_gguf_value){0};
        rc = read_value(store, c, &list[used]);
        used += rc == NB_OK;
    }
    void *value = NULL;
    if (rc == NB_OK)
        rc = nbi_arena_array(&store->arena, "metadata", (size_t)used, sizeof *list, &value);
    if (rc == NB_OK) {
        store->gguf = value;
        store->gguf_count = (int64_t)used;
        if (used) {
            memcpy(store->gguf, list, used * sizeof *list);
            qsort(store->gguf, used, sizeof *list, by_key);
        }
        for (uint64_t i = 1; i < used && rc == NB_OK; i++)
            if (strcmp(store->gguf[i - 1].key, store->gguf[i].key) == 0)
                rc = nbi_fail(NB_EFORMAT, "metadata '%s' occurs twice", store->gguf[i].key);
        for (uint64_t i = 0; i < used && rc == NB_OK; i++)
            rc = describe_value(store, &list[i]);
    }
    free(list);
    return rc;
}

/* ---- tensors ---- */

/* The name of a tensor type in ggml; NULL: none that is known. */
static const char *ggml_type_name(uint32_t type)
{
    static const char *const names[] = {
        [0] = "F32",     [1] = "F16",      [2] = "Q4_0",   [3] = "Q4_1",    [6] = "Q5_0",
        [7] = "Q5_1",    [8] = "Q8_0",     [9] = "Q8_1",   [10] = "Q2_K",   [11] = "Q3_K",
        [12] = "Q4_K",   [13] = "Q5_K",    [14] = "Q6_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
        [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
        [22] = "IQ2_S",  [23] = "IQ4_XS",  [24] = "I8",    [25] = "I16",    [26] = "I32",
        [27] = "I64",    [28] = "F64",     [29] = "IQ1_M", [30] = "BF16",   [34] = "TQ1_0",
        [35] = "TQ2_0",  [39] = "MXFP4",   [40] = "NVFP4"};
    return type < sizeof names / sizeof *names ? names[type] : NULL;
}

static enum nb_status tensor_type(uint32_t type, enum nbi_dtype *dtype)
{
    for (int d = 0; d < NBI_DTYPES; d++)
        if (nbi_dtypes[d].gguf >= 0 && (uint32_t)nbi_dtypes[d].gguf == type) {
            *dtype = (enum nbi_dtype)d;
            return NB_OK;
        }
    char number[16];
    const char *name = ggml_type_name(type);
    snprintf(number, sizeof number, "%" PRIu32, type);
    return nbi_fail(NB_EUNSUPPORTED,
                    "GGUF tensor type %s is not supported; F32, F16, BF16 and NVFP4 are",
                    name ? name : number);
}

static enum nb_status read_shape(struct nbi_cursor *c, struct nbi_part *part)
{
    uint32_t ndim;
    NBI_TRY(nbi_cursor_u32(c, &ndim));
    if (ndim > NBI_GGUF_MAX_DIMS)
        return nbi_fail(NB_EFORMAT, "%" PRIu32 " dimensions, GGUF allows %d", ndim,
                        NBI_GGUF_MAX_DIMS);
    part->ndim = (int)ndim;
    for (int i = part->ndim - 1; i >= 0; i--) { /* the file lists the innermost first */
        uint64_t dim;
        NBI_TRY(nbi_cursor_u64(c, &dim));
        if (dim > INT64_MAX)
            return nbi_fail(NB_EFORMAT, "a dimension of %" PRIu64, dim);
        part->shape[i] = (int64_t)dim;
    }
    return nbi_count(part->shape, part->ndim, &part->count);
}

/* Reads a row of the table. *next: where this tensor's data must start, then the next one's. */
static enum nb_status read_tensor(struct nbi_cursor *c, struct nbi_part *part, uint64_t alignment,
                                  uint64_t *next)
{
    uint32_t type;
    uint64_t offset;
    NBI_TRY(read_shape(c, part));
    NBI_TRY(nbi_cursor_u32(c, &type));
    NBI_TRY(nbi_cursor_u64(c, &offset));
    NBI_TRY(tensor_type(type, &part->dtype));
    if (part->dtype == NBI_NVFP4 && (part->ndim < 1 || part->shape[part->ndim - 1] % 64 != 0))
        return nbi_fail(NB_EFORMAT, "rows of NVFP4 must be a multiple of 64 values");
    if (offset != *next)
        return nbi_fail(NB_EFORMAT, "data at offset %" PRIu64 ", %" PRIu64 " expected", offset,
                        *next);
    part->span.offset = offset; /* relative to the data section; made absolute later */
    part->span.bytes = nbi_dtype_bytes(part->dtype, part->count);
    /* count is at most 2^59 and so a tensor at most 2^62 bytes: neither sum can wrap. */
    *next = nbi_gguf_pad(offset + part->span.bytes, alignment);
    if (*next > (uint64_t)1 << 62)
        return nbi_fail(NB_EFORMAT, "the tensors are larger than any file");
    return NB_OK;
}

static enum nb_status read_tensors(struct nbi_store *store, struct nbi_parts *parts,
                                   struct nbi_cursor *c, uint64_t n, uint64_t alignment)
{
    uint64_t next = 0, size = nbi_source_size(c->src);
    struct nbi_cursor second_pass = *c; /* the first pass finds where the data starts */
    char name[NBI_NAME_MAX + 1];
    size_t len;
    for (uint64_t i = 0; i < n; i++) {
        struct nbi_part part = {0};
        NBI_TRY(nbi_context(read_string(c, name, NBI_NAME_MAX, &len), "tensor %" PRIu64, i));
        NBI_TRY(nbi_context(read_tensor(c, &part, alignment, &next), "tensor '%s'", name));
    }
    uint64_t data_at = nbi_gguf_pad(c->pos, alignment), end = next;
    next = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct nbi_part part = {0};
        NBI_TRY(read_string(&second_pass, name, NBI_NAME_MAX, &len));
        NBI_TRY(read_tensor(&second_pass, &part, alignment, &next));
        part.span.offset += data_at;
        NBI_TRY(nbi_parts_add(store, parts, name, len, &part));
    }
    /* Only the padding after the last tensor may be missing. */
    if (size > data_at && size - data_at > end)
        return nbi_fail(NB_EFORMAT, "%" PRIu64 " bytes after the last tensor",
                        size - data_at - end);
    return NB_OK;
}

static enum nb_status check_crc(const struct nbi_store *store, uint64_t header_bytes)
{
    const struct nbi_gguf_value *value = nbi_gguf_find(store, NBI_GGUF_KEY_CRC);
    bool ours = nbi_gguf_find(store, NBI_GGUF_KEY_VERSION) != NULL;
    if (!value && !ours)
        return NB_OK;
    if (!value || !ours || value->array || value->type != NBI_GGUF_U32)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is damaged or missing",
                        value && value->type == NBI_GGUF_U32 ? NBI_GGUF_KEY_VERSION
                                                             : NBI_GGUF_KEY_CRC);
    uint64_t size = nbi_source_size(store->files[0]);
    if (header_bytes > size)
        header_bytes = size; /* a file without tensor data may end before the padding */
    uint32_t crc = 0, stored = 0;
    uint8_t buf[4096];
    for (uint64_t at = 0; at < header_bytes;) {
        uint64_t n = header_bytes - at < sizeof buf ? header_bytes - at : sizeof buf;
        NBI_TRY(nbi_source_read(store->files[0], at, buf, n));
        for (int i = 0; i < 4; i++) { /* take the checksum's own bytes as zero */
            uint64_t p = value->offset + (uint64_t)i;
            if (p >= at && p < at + n) {
                stored |= (uint32_t)buf[p - at] << 8 * i;
                buf[p - at] = 0;
            }
        }
        crc = nbi_crc32c(crc, buf, n);
        at += n;
    }
    return crc == stored ? NB_OK : nbi_fail(NB_EFORMAT, "the header does not match its checksum");
}

enum nb_status nbi_gguf_read_header(struct nbi_store *store, int file, struct nbi_parts *parts)
{
    struct nbi_cursor c;
    uint32_t magic, version;
    uint64_t tensors, values;
    int64_t alignment = NBI_GGUF_ALIGNMENT;
    NBI_BUG_IF(file != 0);
    nbi_cursor_init(&c, store->files[file]);
    NBI_TRY(nbi_cursor_u32(&c, &magic));
    if (magic != NBI_GGUF_MAGIC)
        return nbi_fail(NB_EFORMAT, "not a GGUF file: it does not start with 'GGUF'");
    NBI_TRY(nbi_cursor_u32(&c, &version));
    if (version != NBI_GGUF_VERSION)
        return nbi_fail(NB_EUNSUPPORTED, "GGUF version %" PRIu32 " is not supported; 3 is",
                        version);
    NBI_TRY(nbi_cursor_u64(&c, &tensors));
    NBI_TRY(nbi_cursor_u64(&c, &values));
    uint64_t left = nbi_cursor_left(&c);
    if (values > left / MIN_VALUE_BYTES || tensors > left / MIN_TENSOR_BYTES)
        return nbi_fail(NB_EFORMAT,
                        "%" PRIu64 " tensors and %" PRIu64
                        " metadata values do not fit the %" PRIu64 " bytes left",
                        tensors, values, left);
    NBI_TRY(read_metadata(store, &c, values));
    enum nb_status rc = nbi_gguf_int(store, "general.alignment", 1, MAX_ALIGNMENT, &alignment);
    if (rc != NB_OK && rc != NB_ENOTFOUND)
        return rc;
    if ((alignment & (alignment - 1)) != 0)
        return nbi_fail(NB_EFORMAT, "'general.alignment' is %" PRId64 ", not a power of two",
                        alignment);
    NBI_TRY(read_tensors(store, parts, &c, tensors, (uint64_t)alignment));
    return check_crc(store, nbi_gguf_pad(c.pos, (uint64_t)alignment));
}

/* ---- values on demand ---- */

const struct nbi_gguf_value *nbi_gguf_find(const struct nbi_store *store, const char *key)
{
    struct nbi_gguf_value wanted = {.key = key};
    if (store->gguf_count == 0)
        return NULL;
    return bsearch(&wanted, store->gguf, (size_t)store->gguf_count, sizeof *store->gguf, by_key);
}

static enum nb_status scalar(const struct nbi_store *store, const char *key, uint32_t *type,
                             uint64_t *bits)
{
    const struct nbi_gguf_value *value = nbi_gguf_find(store, key);
    uint8_t b[8] = {0};
    if (!value)
        return nbi_fail(NB_ENOTFOUND, "metadata '%s' is missing", key);
    if (value->array || value->type == NBI_GGUF_STRING)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not a single number", key);
    NBI_TRY(nbi_source_read(store->files[0], value->offset, b, value->bytes));
    *bits = 0;
    for (int i = 7; i >= 0; i--)
        *bits = *bits << 8 | b[i];
    *type = value->type;
    return NB_OK;
}

enum nb_status nbi_gguf_int(const struct nbi_store *store, const char *key, int64_t min,
                            int64_t max, int64_t *v)
{
    uint32_t type;
    uint64_t bits;
    int64_t n;
    NBI_TRY(scalar(store, key, &type, &bits));
    switch (type) {
    case NBI_GGUF_U8:
    case NBI_GGUF_U16:
    case NBI_GGUF_U32:
    case NBI_GGUF_I64:
        n = (int64_t)bits;
        break;
    case NBI_GGUF_I8:
        n = (int8_t)bits;
        break;
    case NBI_GGUF_I16:
        n = (int16_t)bits;
        break;
    case NBI_GGUF_I32:
        n = (int32_t)bits;
        break;
    case NBI_GGUF_U64:
        n = bits > INT64_MAX ? INT64_MAX : (int64_t)bits;
        break;
    default:
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not a whole number", key);
    }
    if (n < min || n > max)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is %" PRId64 ", outside %" PRId64 " to %" PRId64,
                        key, n, min, max);
    *v = n;
    return NB_OK;
}

enum nb_status nbi_gguf_float(const struct nbi_store *store, const char *key, double *v)
{
    uint32_t type, low;
    uint64_t bits;
    float f;
    NBI_TRY(scalar(store, key, &type, &bits));
    if (type == NBI_GGUF_F64) {
        memcpy(v, &bits, sizeof *v);
    } else if (type == NBI_GGUF_F32) {
        low = (uint32_t)bits;
        memcpy(&f, &low, sizeof f);
        *v = (double)f;
    } else {
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not a floating-point number", key);
    }
    return NB_OK;
}

enum nb_status nbi_gguf_bool(const struct nbi_store *store, const char *key, bool *v)
{
    uint32_t type;
    uint64_t bits;
    NBI_TRY(scalar(store, key, &type, &bits));
    if (type != NBI_GGUF_BOOL || bits > 1)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not true or false", key);
    *v = bits == 1;
    return NB_OK;
}

enum nb_status nbi_gguf_string(const struct nbi_store *store, const char *key, char **text)
{
    const struct nbi_gguf_value *value = nbi_gguf_find(store, key);
    *text = NULL;
    if (!value)
        return nbi_fail(NB_ENOTFOUND, "metadata '%s' is missing", key);
    if (value->array || value->type != NBI_GGUF_STRING)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not a string", key);
    size_t n = value->bytes - 8;
    char *p = malloc(n + 1);
    if (!p)
        return nbi_fail_memory("metadata string", n);
    enum nb_status rc = nbi_source_read(store->files[0], value->offset + 8, p, n);
    p[n] = 0;
    if (rc == NB_OK && (strlen(p) != n || !nbi_utf8_valid(p, n)))
        rc = nbi_fail(NB_EFORMAT, "metadata '%s' is not text", key);
    if (rc != NB_OK) {
        free(p);
        return rc;
    }
    *text = p;
    return NB_OK;
}

static enum nb_status find_array(const struct nbi_store *store, const char *key,
                                 const struct nbi_gguf_value **value)
{
    *value = nbi_gguf_find(store, key);
    if (!*value)
        return nbi_fail(NB_ENOTFOUND, "metadata '%s' is missing", key);
    if (!(*value)->array)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not an array", key);
    return NB_OK;
}

enum nb_status nbi_gguf_each_string(const struct nbi_store *store, const char *key,
                                    nbi_gguf_string_fn fn, void *ctx)
{
    const struct nbi_gguf_value *value;
    NBI_TRY(find_array(store, key, &value));
    if (value->type != NBI_GGUF_STRING)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not an array of strings", key);
    char *bytes = malloc(value->bytes ? value->bytes : 1);
    if (!bytes)
        return nbi_fail_memory("metadata array", value->bytes);
    enum nb_status rc = nbi_source_read(store->files[0], value->offset, bytes, value->bytes);
    uint64_t at = 0;
    for (uint64_t i = 0; i < value->count && rc == NB_OK; i++) {
        uint64_t n = 0;
        for (int k = 7; k >= 0 && value->bytes - at >= 8; k--)
            n = n << 8 | (uint8_t)bytes[at + (uint64_t)k];
        /* Opening checked these lengths, but the file may have changed since. */
        if (value->bytes - at < 8 || n > value->bytes - at - 8) {
            rc = nbi_fail(NB_EIO, "the file changed while it was read");
            break;
        }
        rc = fn(ctx, i, bytes + at + 8, n);
        at += 8 + n;
    }
    free(bytes);
    return rc;
}

enum nb_status nbi_gguf_int_array(const struct nbi_store *store, const char *key, int32_t **v,
                                  uint64_t *count)
{
    const struct nbi_gguf_value *value;
    *v = NULL;
    NBI_TRY(find_array(store, key, &value));
    if (value->type != NBI_GGUF_I32 && value->type != NBI_GGUF_U32)
        return nbi_fail(NB_EFORMAT, "metadata '%s' is not an array of 32-bit numbers", key);
    int32_t *p = malloc(value->bytes ? value->bytes : 1);
    if (!p)
        return nbi_fail_memory("metadata array", value->bytes);
    enum nb_status rc = nbi_source_read(store->files[0], value->offset, p, value->bytes);
    if (rc != NB_OK) {
        free(p);
        return rc;
    }
    *v = p;
    *count = value->count;
    return NB_OK;
}
