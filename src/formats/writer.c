/* writer.c - writes files of any format: layout, shards, positioned writes, the final check. */
#include "formats/writer.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/json.h"
#include "formats/gguf.h"
#include "formats/write.h"
#include "tensor/nvfp4.h"

#define NAME_MAX_WRITTEN 1000 /* the readers' limit less the longest suffix */

struct nbi_writer {
    struct nbi_writer_opts opts; /* path is copied; meta and gguf_name are used in begin only */
    char *path;
    struct nbi_arena arena; /* names */
    struct nbi_out_tensor *tensors;
    int64_t count;
    struct nbi_outfile **files;
    char **file_names; /* within the directory; shards only */
    int file_count;
    uint64_t bytes;
};

static void writer_free(struct nbi_writer *w)
{
    for (int i = 0; w->file_names && i < w->file_count; i++)
        free(w->file_names[i]);
    free(w->file_names);
    free(w->files);
    free(w->tensors);
    free(w->path);
    nbi_arena_release(&w->arena);
    free(w);
}

void nbi_writer_abort(struct nbi_writer *w)
{
    if (!w)
        return;
    for (int i = 0; w->files && i < w->file_count; i++)
        nbi_outfile_abort(w->files[i]);
    writer_free(w);
}

uint64_t nbi_writer_bytes(const struct nbi_writer *w)
{
    return w->bytes;
}

enum nb_status nbi_writer_reopen(const struct nbi_writer *w, struct nbi_store **out,
                                 nbi_name_fn from_gguf)
{
    NBI_BUG_IF(w->file_count != 1);
    NBI_TRY(nbi_store_open_as(out, w->opts.format, nbi_outfile_temp(w->files[0])));
    enum nb_status rc = NB_OK;
    if (w->opts.format == NBI_FORMAT_GGUF)
        rc = nbi_store_rename(*out, from_gguf);
    if (rc != NB_OK) {
        nbi_store_close(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- begin ---- */

static enum nb_status check_tensor(const struct nbi_writer *w, const struct nbi_out_tensor *t)
{
    static const nbi_check_tensor_fn checks[NBI_FORMATS] = {
        [NBI_FORMAT_DAT] = nbi_dat_check_tensor,
        [NBI_FORMAT_SAFETENSORS] = nbi_safetensors_check_tensor,
        [NBI_FORMAT_GGUF] = nbi_gguf_check_tensor,
    };
    const struct nbi_tensor_spec *o = &t->spec;
    if (strlen(o->name) > NAME_MAX_WRITTEN)
        return nbi_fail(NB_EUNSUPPORTED, "its name is longer than %d bytes", NAME_MAX_WRITTEN);
    if (o->dtype == NBI_NVFP4 && (o->ndim != 2 || o->shape[1] % NBI_NVFP4_BLOCK != 0))
        return nbi_fail(NB_EUNSUPPORTED,
                        "NVFP4 needs two dimensions and rows of a multiple of %d values, it has "
                        "%lld; quantize --skip leaves it as it is",
                        NBI_NVFP4_BLOCK, (long long)o->shape[o->ndim > 0 ? o->ndim - 1 : 0]);
    return checks[w->opts.format](t);
}

static enum nb_status name_in_gguf(struct nbi_writer *w, struct nbi_out_tensor *t)
{
    char translated[NBI_GGUF_NAME_MAX + 65], *name;
    t->file_name = NULL;
    if (!w->opts.gguf_name(t->spec.name, translated, sizeof translated))
        return NB_OK;
    NBI_TRY(nbi_arena_string(&w->arena, "names", translated, strlen(translated), &name));
    t->file_name = name;
    return NB_OK;
}

static enum nb_status set_tensors(struct nbi_writer *w, const struct nbi_tensor_spec *specs)
{
    for (int64_t i = 0; i < w->count; i++) {
        struct nbi_out_tensor *t = &w->tensors[i];
        char *name;
        t->spec = specs[i];
        NBI_TRY(nbi_arena_string(&w->arena, "names", specs[i].name, strlen(specs[i].name), &name));
        t->spec.name = t->file_name = name;
        if (w->opts.format == NBI_FORMAT_GGUF && w->opts.gguf_name)
            NBI_TRY(name_in_gguf(w, t));
        NBI_TRY(nbi_count(t->spec.shape, t->spec.ndim, &t->count));
        NBI_TRY(nbi_context(check_tensor(w, t), "cannot write tensor '%s' to '%s'", name, w->path));
    }
    return NB_OK;
}

/* Assigns tensors to files in order, starting a new file at the size limit; returns the number of
 * files. */
static int assign_files(struct nbi_writer *w, uint64_t limit)
{
    uint64_t used = 0;
    int file = 0;
    for (int64_t i = 0; i < w->count; i++) {
        uint64_t bytes = nbi_dtype_bytes(w->tensors[i].spec.dtype, w->tensors[i].count);
        if (limit && used && bytes > limit - (used < limit ? used : limit)) {
            file++;
            used = 0;
        }
        used += bytes;
        w->tensors[i].file = file;
    }
    return file + 1;
}

static enum nb_status name_shard(struct nbi_writer *w, int i, char **path)
{
    char name[64];
    if (w->file_count == 1)
        snprintf(name, sizeof name, "model.safetensors");
    else
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i + 1, w->file_count);
    w->file_names[i] = strdup(name);
    *path = w->file_names[i] ? nbi_path_join(w->path, name) : NULL;
    return *path ? NB_OK : nbi_fail_memory("file name", sizeof name);
}

static enum nb_status open_files(struct nbi_writer *w)
{
    w->files = calloc((size_t)w->file_count, sizeof *w->files);
    w->file_names = calloc((size_t)w->file_count, sizeof *w->file_names);
    if (!w->files || !w->file_names)
        return nbi_fail_memory("file list", (size_t)w->file_count * sizeof *w->files);
    if (!w->opts.shard_bytes)
        return nbi_outfile_open(&w->files[0], w->path);
    for (int i = 0; i < w->file_count; i++) {
        char *path = NULL;
        enum nb_status rc = name_shard(w, i, &path);
        if (rc == NB_OK)
            rc = nbi_outfile_open(&w->files[i], path);
        free(path);
        NBI_TRY(rc);
    }
    return NB_OK;
}

static enum nb_status write_headers(struct nbi_writer *w)
{
    static const nbi_write_header_fn headers[NBI_FORMATS] = {
        [NBI_FORMAT_DAT] = nbi_dat_write_header,
        [NBI_FORMAT_SAFETENSORS] = nbi_safetensors_write_header,
        [NBI_FORMAT_GGUF] = nbi_gguf_write_header,
    };
    int64_t first = 0;
    for (int i = 0; i < w->file_count; i++) {
        int64_t end = first;
        uint64_t size = 0;
        while (end < w->count && w->tensors[end].file == i)
            end++;
        NBI_TRY(
            headers[w->opts.format](w->files[i], &w->opts, w->tensors + first, end - first, &size));
        NBI_TRY(nbi_outfile_reserve(w->files[i], size));
        w->bytes += size;
        first = end;
    }
    return NB_OK;
}

/* Safetensors layouts always store a tensor scale, which is 1 for a single-level tensor. */
static enum nb_status write_unit_scales(struct nbi_writer *w)
{
    for (int64_t i = 0; i < w->count; i++)
        if (w->tensors[i].tscale.bytes && !w->tensors[i].spec.two_level)
            NBI_TRY(nbi_writer_put_tensor_scale(w, i, 1.0f, 0));
    return NB_OK;
}

enum nb_status nbi_writer_begin(struct nbi_writer **out, const struct nbi_writer_opts *opts,
                                const struct nbi_tensor_spec *specs, int64_t count)
{
    *out = NULL;
    struct nbi_writer *w = calloc(1, sizeof *w);
    if (!w)
        return nbi_fail_memory("writer", sizeof *w);
    w->opts = *opts;
    w->count = count;
    w->path = strdup(opts->path);
    w->tensors = calloc((size_t)count + 1, sizeof *w->tensors);
    enum nb_status rc = w->path && w->tensors ? set_tensors(w, specs)
                                              : nbi_fail_memory("writer", sizeof *w->tensors);
    if (rc == NB_OK) {
        w->file_count = assign_files(w, opts->shard_bytes);
        rc = open_files(w);
    }
    if (rc == NB_OK)
        rc = write_headers(w);
    if (rc == NB_OK)
        rc = write_unit_scales(w);
    if (rc != NB_OK) {
        nbi_writer_abort(w);
        return rc;
    }
    *out = w;
    return NB_OK;
}

/* ---- values ---- */

static enum nb_status put_bytes(struct nbi_writer *w, struct nbi_out_tensor *t,
                                const struct nbi_extent *extent, uint64_t at, const void *bytes,
                                size_t len)
{
    NBI_BUG_IF(at > extent->bytes || len > extent->bytes - at);
    NBI_TRY(nbi_outfile_write(w->files[t->file], extent->offset + at, bytes, len));
    atomic_fetch_add(&t->written, len);
    return NB_OK;
}

enum nb_status nbi_writer_put(struct nbi_writer *w, int64_t index, int64_t first, int64_t count,
                              const void *values)
{
    struct nbi_out_tensor *t = &w->tensors[index];
    NBI_BUG_IF(t->spec.dtype == NBI_NVFP4);
    uint64_t size = (uint64_t)nbi_dtypes[t->spec.dtype].bytes;
    return put_bytes(w, t, &t->data, (uint64_t)first * size, values, (size_t)count * size);
}

static enum nb_status put_gguf(struct nbi_writer *w, struct nbi_out_tensor *t, int64_t first,
                               int64_t count, const uint8_t *codes, const uint8_t *scales)
{
    size_t bytes = (size_t)count / 64 * 36;
    uint8_t *blocks = malloc(bytes + 1);
    if (!blocks)
        return nbi_fail_memory("NVFP4 blocks", bytes);
    nbi_nvfp4_to_gguf(blocks, codes, scales, count / 64);
    enum nb_status rc = put_bytes(w, t, &t->data, (uint64_t)first / 64 * 36, blocks, bytes);
    free(blocks);
    return rc;
}

enum nb_status nbi_writer_put_nvfp4(struct nbi_writer *w, int64_t index, int64_t first,
                                    int64_t count, const uint8_t *codes, const uint8_t *scales)
{
    struct nbi_out_tensor *t = &w->tensors[index];
    NBI_BUG_IF(t->spec.dtype != NBI_NVFP4 || first % 64 != 0 || count % NBI_NVFP4_BLOCK != 0);
    if (w->opts.format == NBI_FORMAT_GGUF)
        return put_gguf(w, t, first, count, codes, scales);
    NBI_TRY(put_bytes(w, t, &t->data, (uint64_t)first / 2, codes, (size_t)count / 2));
    return put_bytes(w, t, &t->scale, (uint64_t)first / NBI_NVFP4_BLOCK, scales,
                     (size_t)count / NBI_NVFP4_BLOCK);
}

enum nb_status nbi_writer_put_tensor_scale(struct nbi_writer *w, int64_t index, float scale,
                                           float divisor)
{
    struct nbi_out_tensor *t = &w->tensors[index];
    NBI_BUG_IF(t->tscale.bytes != 4);
    bool reciprocal =
        w->opts.format == NBI_FORMAT_SAFETENSORS && w->opts.layout == NBI_LAYOUT_COMPRESSED_TENSORS;
    float stored = !reciprocal ? scale : divisor != 0 ? divisor : 1.0f / scale;
    if (!isnormal(stored) || stored < 0)
        return nbi_fail(NB_EVALUE, "tensor scale %g of '%s' cannot be stored", (double)scale,
                        t->spec.name);
    return put_bytes(w, t, &t->tscale, 0, &stored, 4);
}

/* ---- commit ---- */

static enum nb_status write_index(const struct nbi_writer *w)
{
    json_t *map = json_object();
    uint64_t total = 0;
    bool ok = true;
    for (int64_t i = 0; i < w->count; i++) {
        struct nbi_out_tensor *s = &w->tensors[i];
        struct nbi_st_part parts[3];
        int n = nbi_safetensors_parts(s, w->opts.layout, parts);
        for (int k = 0; k < n; k++)
            nbi_json_set(map, parts[k].name, json_string(w->file_names[s->file]), &ok);
        total += s->data.bytes + s->scale.bytes + s->tscale.bytes;
    }
    json_t *index =
        json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *path = nbi_path_join(w->path, NBI_SHARD_INDEX);
    enum nb_status rc =
        ok && index && path ? nbi_json_write_file(index, path) : nbi_fail_memory("index", 0);
    json_decref(index);
    free(path);
    return rc;
}

enum nb_status nbi_writer_commit(struct nbi_writer *w)
{
    enum nb_status rc = NB_OK;
    for (int64_t i = 0; i < w->count; i++) {
        const struct nbi_out_tensor *s = &w->tensors[i];
        NBI_BUG_IF(s->written != s->data.bytes + s->scale.bytes + s->tscale.bytes);
    }
    for (int i = 0; i < w->file_count; i++) {
        struct nbi_outfile *f = w->files[i];
        w->files[i] = NULL;
        if (rc == NB_OK)
            rc = nbi_outfile_commit(f);
        else
            nbi_outfile_abort(f);
    }
    if (rc == NB_OK && w->file_count > 1)
        rc = write_index(w);
    writer_free(w);
    return rc;
}
