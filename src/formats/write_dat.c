/* write_dat.c - layout of a `.dat`: each entry's header directly precedes its bytes. */
#include <string.h>

#include "formats/write.h"
#include "tensor/nvfp4.h"

static void uleb(struct nbi_str *s, uint64_t v)
{
    do {
        uint8_t b = (uint8_t)(v & 0x7F);
        v >>= 7;
        b = (uint8_t)(v ? b | 0x80 : b);
        nbi_str_append(s, &b, 1);
    } while (v);
}

struct entry {
    const char *name, *suffix;
    enum nbi_dtype dtype;
    int ndim;
    const int64_t *shape;
};

/* Writes an entry's header at *at and moves *at past the entry's bytes. */
static enum nb_status put_entry(struct nbi_outfile *f, uint64_t *at, struct entry e,
                                struct nbi_extent *extent)
{
    struct nbi_str s = {0};
    int64_t count;
    NBI_TRY(nbi_count(e.shape, e.ndim, &count));
    uleb(&s, strlen(e.name) + strlen(e.suffix));
    nbi_str_puts(&s, e.name);
    nbi_str_puts(&s, e.suffix);
    uleb(&s, (uint64_t)nbi_dtypes[e.dtype].dat);
    uleb(&s, (uint64_t)e.ndim);
    for (int i = 0; i < e.ndim; i++)
        uleb(&s, (uint64_t)e.shape[i]);
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_outfile_write(f, *at, nbi_str_text(&s), s.len);
    extent->offset = *at + s.len;
    extent->bytes = nbi_dtype_bytes(e.dtype, count);
    *at = extent->offset + extent->bytes;
    nbi_str_release(&s);
    return rc;
}

static enum nb_status put_tensor(struct nbi_outfile *f, uint64_t *at, struct nbi_out_tensor *t)
{
    const struct nbi_layout_info *suffix = &nbi_layouts[NBI_LAYOUT_DAT];
    const struct nbi_tensor_spec *o = &t->spec;
    if (o->dtype != NBI_NVFP4)
        return put_entry(f, at, (struct entry){o->name, "", o->dtype, o->ndim, o->shape}, &t->data);
    int64_t codes[2] = {o->shape[0], o->shape[1] / 2};
    int64_t scales[2] = {o->shape[0], o->shape[1] / NBI_NVFP4_BLOCK}, one = 1;
    NBI_TRY(put_entry(f, at, (struct entry){o->name, suffix->codes, NBI_U8, 2, codes}, &t->data));
    NBI_TRY(put_entry(f, at, (struct entry){o->name, suffix->block_scales, NBI_E4M3, 2, scales},
                      &t->scale));
    if (o->two_level)
        NBI_TRY(put_entry(f, at, (struct entry){o->name, suffix->tensor_scale, NBI_F32, 1, &one},
                          &t->tscale));
    return NB_OK;
}

enum nb_status nbi_dat_check_tensor(const struct nbi_out_tensor *t)
{
    if (t->spec.dtype != NBI_NVFP4 && nbi_dtypes[t->spec.dtype].dat < 0)
        return nbi_fail(NB_EUNSUPPORTED, "a .dat has no element type %s",
                        nbi_dtypes[t->spec.dtype].name);
    return NB_OK;
}

enum nb_status nbi_dat_write_header(struct nbi_outfile *f, const struct nbi_writer_opts *opts,
                                    struct nbi_out_tensor *tensors, int64_t count, uint64_t *size)
{
    struct nbi_str s = {0};
    uint64_t entries = 0;
    (void)opts;
    for (int64_t i = 0; i < count; i++)
        entries += tensors[i].spec.dtype != NBI_NVFP4 ? 1 : tensors[i].spec.two_level ? 3 : 2;
    uleb(&s, entries);
    enum nb_status rc = nbi_str_status(&s);
    if (rc == NB_OK)
        rc = nbi_outfile_write(f, 0, nbi_str_text(&s), s.len);
    uint64_t at = s.len;
    nbi_str_release(&s);
    for (int64_t i = 0; i < count && rc == NB_OK; i++)
        rc = put_tensor(f, &at, &tensors[i]);
    *size = at;
    return rc;
}
