/* write_gguf.c - layout of a GGUF file: metadata, tensor table, data aligned to 32 bytes. */
#include <string.h>

#include "base/crc.h"
#include "formats/gguf.h"
#include "formats/write.h"

/* ---- metadata ---- */

struct nbi_gguf_meta {
    struct nbi_str bytes;
    uint64_t count;
};

static void put_u32(struct nbi_str *s, uint32_t v)
{
    uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    nbi_str_append(s, b, sizeof b);
}

static void put_u64(struct nbi_str *s, uint64_t v)
{
    put_u32(s, (uint32_t)v);
    put_u32(s, (uint32_t)(v >> 32));
}

static void put_string(struct nbi_str *s, const char *text, size_t len)
{
    put_u64(s, len);
    nbi_str_append(s, text, len);
}

static void put_key(struct nbi_gguf_meta *meta, const char *key, uint32_t type)
{
    put_string(&meta->bytes, key, strlen(key));
    put_u32(&meta->bytes, type);
    meta->count++;
}

enum nb_status nbi_gguf_meta_new(struct nbi_gguf_meta **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? NB_OK : nbi_fail_memory("metadata", sizeof **out);
}

void nbi_gguf_meta_free(struct nbi_gguf_meta *meta)
{
    if (!meta)
        return;
    nbi_str_release(&meta->bytes);
    free(meta);
}

void nbi_gguf_meta_u32(struct nbi_gguf_meta *meta, const char *key, uint32_t v)
{
    put_key(meta, key, NBI_GGUF_U32);
    put_u32(&meta->bytes, v);
}

void nbi_gguf_meta_f32(struct nbi_gguf_meta *meta, const char *key, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_key(meta, key, NBI_GGUF_F32);
    put_u32(&meta->bytes, bits);
}

void nbi_gguf_meta_bool(struct nbi_gguf_meta *meta, const char *key, bool v)
{
    uint8_t b = v;
    put_key(meta, key, NBI_GGUF_BOOL);
    nbi_str_append(&meta->bytes, &b, 1);
}

void nbi_gguf_meta_string(struct nbi_gguf_meta *meta, const char *key, const char *v)
{
    put_key(meta, key, NBI_GGUF_STRING);
    put_string(&meta->bytes, v, strlen(v));
}

void nbi_gguf_meta_strings(struct nbi_gguf_meta *meta, const char *key, uint64_t count)
{
    put_key(meta, key, NBI_GGUF_ARRAY);
    put_u32(&meta->bytes, NBI_GGUF_STRING);
    put_u64(&meta->bytes, count);
}

void nbi_gguf_meta_next_string(struct nbi_gguf_meta *meta, const char *v, size_t len)
{
    put_string(&meta->bytes, v, len);
}

void nbi_gguf_meta_ints(struct nbi_gguf_meta *meta, const char *key, const int32_t *v,
                        uint64_t count)
{
    put_key(meta, key, NBI_GGUF_ARRAY);
    put_u32(&meta->bytes, NBI_GGUF_I32);
    put_u64(&meta->bytes, count);
    for (uint64_t i = 0; i < count; i++)
        put_u32(&meta->bytes, (uint32_t)v[i]);
}

/* ---- tensors ---- */

enum nb_status nbi_gguf_check_tensor(const struct nbi_out_tensor *t)
{
    const struct nbi_tensor_spec *o = &t->spec;
    if (!t->file_name || strlen(t->file_name) > NBI_GGUF_NAME_MAX)
        return nbi_fail(NB_EUNSUPPORTED, "it has no name in a GGUF of this architecture");
    if (nbi_dtypes[o->dtype].gguf < 0 || o->ndim < 1 || o->ndim > NBI_GGUF_MAX_DIMS)
        return nbi_fail(NB_EUNSUPPORTED, "GGUF cannot hold %d dimensions of %s", o->ndim,
                        nbi_dtypes[o->dtype].name);
    if (o->dtype != NBI_NVFP4)
        return NB_OK;
    if (o->shape[1] % 64 != 0)
        return nbi_fail(NB_EUNSUPPORTED,
                        "GGUF stores NVFP4 in blocks of 64 values and its rows have %lld; choose "
                        ".dat or .safetensors, or leave it unquantised (convert --dtype bf16, "
                        "quantize --skip)",
                        (long long)o->shape[1]);
    return NB_OK;
}

/* Appends a row of the tensor table. Dimensions are stored innermost first. */
static void put_row(struct nbi_str *s, const char *name, const struct nbi_tensor_spec *o,
                    struct nbi_extent *extent, uint64_t *at)
{
    put_string(s, name, strlen(name));
    put_u32(s, (uint32_t)o->ndim);
    for (int i = o->ndim - 1; i >= 0; i--)
        put_u64(s, (uint64_t)o->shape[i]);
    put_u32(s, (uint32_t)nbi_dtypes[o->dtype].gguf);
    put_u64(s, *at);
    extent->offset = *at;
    *at = nbi_gguf_pad(*at + extent->bytes, NBI_GGUF_ALIGNMENT);
}

static void put_tensor(struct nbi_str *s, struct nbi_out_tensor *t, uint64_t *at)
{
    t->data.bytes = nbi_dtype_bytes(t->spec.dtype, t->count);
    put_row(s, t->file_name, &t->spec, &t->data, at);
    if (t->spec.dtype == NBI_NVFP4 && t->spec.two_level) {
        const struct nbi_tensor_spec scale = {.dtype = NBI_F32, .ndim = 1, .shape = {1}};
        char name[NBI_GGUF_NAME_MAX + 65];
        snprintf(name, sizeof name, "%.*s%s", (int)nbi_stem_length(t->file_name), t->file_name,
                 nbi_layouts[NBI_LAYOUT_GGUF].tensor_scale);
        t->tscale.bytes = 4;
        put_row(s, name, &scale, &t->tscale, at);
    }
}

enum nb_status nbi_gguf_write_header(struct nbi_outfile *f, const struct nbi_writer_opts *opts,
                                     struct nbi_out_tensor *tensors, int64_t count, uint64_t *size)
{
    const struct nbi_gguf_meta *meta = opts->meta;
    struct nbi_str s = {0};
    uint64_t rows = 0, at = 0;
    for (int64_t i = 0; i < count; i++)
        rows += tensors[i].spec.dtype == NBI_NVFP4 && tensors[i].spec.two_level ? 2 : 1;
    put_u32(&s, NBI_GGUF_MAGIC);
    put_u32(&s, NBI_GGUF_VERSION);
    put_u64(&s, rows);
    put_u64(&s, meta->count + 2);
    nbi_str_append(&s, meta->bytes.p, meta->bytes.len);
    struct nbi_gguf_meta own = {.bytes = s};
    nbi_gguf_meta_string(&own, NBI_GGUF_KEY_VERSION, nb_version());
    nbi_gguf_meta_u32(&own, NBI_GGUF_KEY_CRC, 0);
    s = own.bytes;
    size_t crc_at = s.len - 4;
    for (int64_t i = 0; i < count; i++)
        put_tensor(&s, &tensors[i], &at);
    while (s.len % NBI_GGUF_ALIGNMENT != 0 && !s.failed)
        nbi_str_append(&s, "", 1);
    enum nb_status rc = meta->bytes.failed ? nbi_str_status(&meta->bytes) : nbi_str_status(&s);
    if (rc == NB_OK) {
        uint32_t crc = nbi_crc32c(0, s.p, s.len);
        for (int i = 0; i < 4; i++)
            s.p[crc_at + (size_t)i] = (char)(crc >> 8 * i);
        rc = nbi_outfile_write(f, 0, s.p, s.len);
    }
    for (int64_t i = 0; i < count; i++) {
        tensors[i].data.offset += s.len;
        tensors[i].tscale.offset += s.len;
    }
    *size = s.len + at;
    nbi_str_release(&s);
    return rc;
}
