/* write_safetensors.c - layout of a `.safetensors` file: parts sorted by element size, then by
 * name, as the reference library does, so that every tensor is aligned to its element. */
#include <string.h>

#include "formats/write.h"
#include "tensor/nvfp4.h"

static struct nbi_st_part make_part(const char *stem, size_t stem_len, const char *suffix,
                                    enum nbi_dtype dtype, struct nbi_extent *extent)
{
    struct nbi_st_part p = {.dtype = dtype, .extent = extent};
    snprintf(p.name, sizeof p.name, "%.*s%s", (int)stem_len, stem, suffix);
    return p;
}

int nbi_safetensors_parts(struct nbi_out_tensor *t, enum nbi_layout layout,
                          struct nbi_st_part out[3])
{
    const struct nbi_tensor_spec *o = &t->spec;
    if (o->dtype != NBI_NVFP4) {
        out[0] = make_part(o->name, strlen(o->name), "", o->dtype, &t->data);
        out[0].ndim = o->ndim;
        memcpy(out[0].shape, o->shape, sizeof o->shape);
        return 1;
    }
    const struct nbi_layout_info *suffix = &nbi_layouts[layout];
    size_t stem = nbi_stem_length(o->name);
    out[0] = make_part(o->name, stem, suffix->codes, NBI_U8, &t->data);
    out[1] = make_part(o->name, stem, suffix->block_scales, NBI_E4M3, &t->scale);
    out[2] = make_part(o->name, stem, suffix->tensor_scale, NBI_F32, &t->tscale);
    for (int i = 0; i < 2; i++) {
        out[i].ndim = 2;
        out[i].shape[0] = o->shape[0];
    }
    out[0].shape[1] = o->shape[1] / 2;
    out[1].shape[1] = o->shape[1] / NBI_NVFP4_BLOCK;
    out[2].ndim = layout == NBI_LAYOUT_COMPRESSED_TENSORS ? 1 : 0;
    out[2].shape[0] = 1;
    return 3;
}

static int file_order(const void *a, const void *b)
{
    const struct nbi_st_part *x = a, *y = b;
    int dx = nbi_dtypes[x->dtype].bytes, dy = nbi_dtypes[y->dtype].bytes;
    return dx != dy ? dy - dx : strcmp(x->name, y->name);
}

static void json_string(struct nbi_str *s, const char *text)
{
    nbi_str_puts(s, "\"");
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            nbi_str_append(s, "\\", 1);
        if ((unsigned char)*text < 0x20)
            nbi_str_printf(s, "\\u%04x", (unsigned)*text);
        else
            nbi_str_append(s, text, 1);
    }
    nbi_str_puts(s, "\"");
}

static enum nb_status part_json(struct nbi_str *s, const struct nbi_st_part *p, uint64_t *at)
{
    int64_t count;
    NBI_TRY(nbi_count(p->shape, p->ndim, &count));
    p->extent->offset = *at;
    p->extent->bytes = nbi_dtype_bytes(p->dtype, count);
    *at += p->extent->bytes;
    nbi_str_puts(s, ",");
    json_string(s, p->name);
    nbi_str_printf(s, ":{\"dtype\":\"%s\",\"shape\":[", nbi_dtypes[p->dtype].safetensors);
    for (int i = 0; i < p->ndim; i++)
        nbi_str_printf(s, "%s%lld", i ? "," : "", (long long)p->shape[i]);
    nbi_str_printf(s, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)p->extent->offset,
                   (unsigned long long)*at);
    return NB_OK;
}

static enum nb_status build_header(struct nbi_str *s, struct nbi_st_part *parts, int64_t n,
                                   uint64_t *data_bytes)
{
    nbi_str_puts(s, "{\"__metadata__\":{\"format\":\"pt\"}");
    *data_bytes = 0;
    for (int64_t i = 0; i < n; i++)
        NBI_TRY(part_json(s, &parts[i], data_bytes));
    nbi_str_puts(s, "}");
    while (s->len % 8 != 0 && !s->failed)
        nbi_str_puts(s, " ");
    return nbi_str_status(s);
}

static enum nb_status write_header(struct nbi_outfile *f, const struct nbi_str *s)
{
    uint8_t len[8];
    for (int i = 0; i < 8; i++)
        len[i] = (uint8_t)((uint64_t)s->len >> 8 * i);
    NBI_TRY(nbi_outfile_write(f, 0, len, sizeof len));
    return nbi_outfile_write(f, sizeof len, nbi_str_text(s), s->len);
}

enum nb_status nbi_safetensors_check_tensor(const struct nbi_out_tensor *t)
{
    const struct nbi_tensor_spec *o = &t->spec;
    if (o->dtype != NBI_NVFP4 && !nbi_dtypes[o->dtype].safetensors)
        return nbi_fail(NB_EUNSUPPORTED, "safetensors has no element type %s",
                        nbi_dtypes[o->dtype].name);
    if (o->dtype == NBI_NVFP4 && !nbi_is_weight_name(o->name))
        return nbi_fail(NB_EUNSUPPORTED, "a quantised tensor in safetensors must end in '.weight'");
    return NB_OK;
}

enum nb_status nbi_safetensors_write_header(struct nbi_outfile *f,
                                            const struct nbi_writer_opts *opts,
                                            struct nbi_out_tensor *tensors, int64_t count,
                                            uint64_t *size)
{
    struct nbi_st_part *parts = calloc((size_t)count * 3 + 1, sizeof *parts);
    if (!parts)
        return nbi_fail_memory("tensor list", (size_t)count * 3 * sizeof *parts);
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++)
        n += nbi_safetensors_parts(&tensors[i], opts->layout, parts + n);
    if (n)
        qsort(parts, (size_t)n, sizeof *parts, file_order);
    struct nbi_str s = {0};
    uint64_t data_bytes = 0;
    enum nb_status rc = build_header(&s, parts, n, &data_bytes);
    for (int64_t i = 0; i < n && rc == NB_OK; i++)
        parts[i].extent->offset += 8 + s.len; /* now absolute */
    if (rc == NB_OK)
        rc = write_header(f, &s);
    *size = 8 + s.len + data_bytes;
    nbi_str_release(&s);
    free(parts);
    return rc;
}
