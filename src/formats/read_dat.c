/* read_dat.c - reader of the `.dat` container (docs/FORMATS.md): a count, then for each tensor a
 * name, a type code, dimensions and the bytes. All lengths are LEB128; nothing is aligned; there is
 * no checksum.
 *
 * The file does not store its length, so the end is checked too: bytes after the last tensor mean
 * that some length was wrong. */
#include "formats/read.h"

static enum nb_status element_type(uint64_t code, enum nbi_dtype *dtype)
{
    for (int d = 0; d < NBI_DTYPES; d++)
        if (nbi_dtypes[d].dat >= 0 && (uint64_t)nbi_dtypes[d].dat == code) {
            *dtype = (enum nbi_dtype)d;
            return NB_OK;
        }
    return nbi_fail(NB_EFORMAT, "unknown element type code %llu", (unsigned long long)code);
}

static enum nb_status read_name(struct nbi_cursor *c, char name[NBI_NAME_MAX + 1], size_t *len)
{
    uint64_t n;
    NBI_TRY(nbi_cursor_uleb(c, &n));
    if (n == 0 || n > NBI_NAME_MAX)
        return nbi_fail(NB_EFORMAT, "name length %llu at offset %llu is not within 1 to %d",
                        (unsigned long long)n, (unsigned long long)c->pos, NBI_NAME_MAX);
    NBI_TRY(nbi_cursor_bytes(c, name, n));
    name[n] = 0;
    *len = (size_t)n;
    return NB_OK;
}

/* Reads an entry after its name. */
static enum nb_status read_body(struct nbi_cursor *c, struct nbi_part *part)
{
    uint64_t code, ndim, dim;
    NBI_TRY(nbi_cursor_uleb(c, &code));
    NBI_TRY(element_type(code, &part->dtype));
    NBI_TRY(nbi_cursor_uleb(c, &ndim));
    if (ndim > NB_MAX_DIMS)
        return nbi_fail(NB_EFORMAT, "%llu dimensions, at most %d are supported",
                        (unsigned long long)ndim, NB_MAX_DIMS);
    part->ndim = (int)ndim;
    for (int i = 0; i < part->ndim; i++) {
        NBI_TRY(nbi_cursor_uleb(c, &dim));
        if (dim > INT64_MAX)
            return nbi_fail(NB_EFORMAT, "dimension %d is %llu", i, (unsigned long long)dim);
        part->shape[i] = (int64_t)dim;
    }
    NBI_TRY(nbi_count(part->shape, part->ndim, &part->count));
    part->span.offset = c->pos;
    part->span.bytes = nbi_dtype_bytes(part->dtype, part->count);
    return nbi_cursor_skip(c, part->span.bytes);
}

static enum nb_status read_entry(struct nbi_store *store, struct nbi_parts *parts,
                                 struct nbi_cursor *c, int file)
{
    char name[NBI_NAME_MAX + 1];
    size_t len = 0;
    struct nbi_part part = {.span = {.file = file}};
    NBI_TRY(read_name(c, name, &len));
    NBI_TRY(nbi_context(read_body(c, &part), "tensor '%s'", name));
    return nbi_parts_add(store, parts, name, len, &part);
}

enum nb_status nbi_dat_read_header(struct nbi_store *store, int file, struct nbi_parts *parts)
{
    struct nbi_cursor c;
    uint64_t count;
    nbi_cursor_init(&c, store->files[file]);
    NBI_TRY(nbi_cursor_uleb(&c, &count));
    if (count > nbi_cursor_left(&c) / 4) /* an entry takes at least four bytes */
        return nbi_fail(NB_EFORMAT, "%llu tensors announced in a file of %llu bytes",
                        (unsigned long long)count,
                        (unsigned long long)nbi_source_size(store->files[file]));
    for (uint64_t i = 0; i < count; i++)
        NBI_TRY(nbi_context(read_entry(store, parts, &c, file), "entry %llu of %llu",
                            (unsigned long long)i + 1, (unsigned long long)count));
    if (nbi_cursor_left(&c) > 0)
        return nbi_fail(NB_EFORMAT, "%llu bytes after the last tensor",
                        (unsigned long long)nbi_cursor_left(&c));
    return NB_OK;
}
