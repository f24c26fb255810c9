/* writer.c - files of any format in the making: slots, shards, positioned writes, final check. */
#include "formats/writer.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/json.h"
#include "formats/gguf.h"
#include "formats/write.h"
#include "tensor/nvfp4.h"

#define NAME_MAX_WRITTEN 1000 /* what readers allow, less the longest suffix */

struct nbi_writer {
    struct nbi_writer_opts opts; /* path copied, the rest not used after begin */
    char *path;
    struct nbi_arena arena; /* names */
    struct nbi_out_tensor *slots;
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
    free(w->slots);
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

static enum nb_status check_slot(const struct nbi_writer *w, const struct nbi_out_tensor *slot)
{
    const struct nbi_tensor_spec *t = &slot->out;
    if (strlen(t->name) > NAME_MAX_WRITTEN)
        return nbi_fail(NB_EUNSUPPORTED, "its name is longer than %d bytes", NAME_MAX_WRITTEN);
    if (t->dtype == NBI_NVFP4 && (t->ndim != 2 || t->shape[1] % NBI_NVFP4_BLOCK != 0))
        return nbi_fail(NB_EUNSUPPORTED,
                        "NVFP4 needs two dimensions and rows of a multiple of %d values, it has "
                        "%lld; quantize --skip leaves it as it is",
                        NBI_NVFP4_BLOCK, (long long)t->shape[t->ndim > 0 ? t->ndim - 1 : 0]);
    return w->opts.format == NBI_FORMAT_DAT    ? nbi_check_dat(slot)
           : w->opts.format == NBI_FORMAT_GGUF ? nbi_check_gguf(slot)
                                               : nbi_check_safetensors(slot);
}

static enum nb_status name_in_gguf(struct nbi_writer *w, struct nbi_out_tensor *slot)
{
    char translated[NBI_GGUF_NAME_MAX + 65], *name;
    slot->file_name = NULL;
    if (!w->opts.gguf_name(slot->out.name, translated, sizeof translated))
        return NB_OK;
    NBI_TRY(nbi_arena_string(&w->arena, "names", translated, strlen(translated), &name));
    slot->file_name = name;
    return NB_OK;
}

static enum nb_status fill_slots(struct nbi_writer *w, const struct nbi_tensor_spec *tensors)
{
    for (int64_t i = 0; i < w->count; i++) {
        struct nbi_out_tensor *slot = &w->slots[i];
        char *name;
        slot->out = tensors[i];
        NBI_TRY(
            nbi_arena_string(&w->arena, "names", tensors[i].name, strlen(tensors[i].name), &name));
        slot->out.name = slot->file_name = name;
        if (w->opts.format == NBI_FORMAT_GGUF && w->opts.gguf_name)
            NBI_TRY(name_in_gguf(w, slot));
        NBI_TRY(nbi_count(slot->out.shape, slot->out.ndim, &slot->count));
        NBI_TRY(
            nbi_context(check_slot(w, slot), "cannot write tensor '%s' to '%s'", name, w->path));
    }
    return NB_OK;
}

/* Assigns slots to files in order, a new one when the limit would be passed; returns how many. */
static int assign_files(struct nbi_writer *w, uint64_t limit)
{
    uint64_t used = 0;
    int file = 0;
    for (int64_t i = 0; i < w->count; i++) {
        uint64_t bytes = nbi_dtype_bytes(w->slots[i].out.dtype, w->slots[i].count);
        if (limit && used && bytes > limit - (used < limit ? used : limit)) {
            file++;
            used = 0;
        }
        used += bytes;
        w->slots[i].file = file;
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

static enum nb_status emit_files(struct nbi_writer *w)
{
    int64_t first = 0;
    for (int i = 0; i < w->file_count; i++) {
        int64_t end = first;
        uint64_t size = 0;
        while (end < w->count && w->slots[end].file == i)
            end++;
        struct nbi_out_tensor *slots = w->slots + first;
        enum nb_status rc =
            w->opts.format == NBI_FORMAT_DAT
                ? nbi_dat_write_header(w->files[i], slots, end - first, &size)
            : w->opts.format == NBI_FORMAT_GGUF
                ? nbi_gguf_write_header(w->files[i], slots, end - first, w->opts.meta, &size)
                : nbi_safetensors_write_header(w->files[i], slots, end - first, w->opts.layout,
                                               &size);
        NBI_TRY(rc);
        NBI_TRY(nbi_outfile_reserve(w->files[i], size));
        w->bytes += size;
        first = end;
    }
    return NB_OK;
}

/* Safetensors layouts always store a tensor scale; a single-level tensor has 1 there. */
static enum nb_status write_unit_scales(struct nbi_writer *w)
{
    for (int64_t i = 0; i < w->count; i++)
        if (w->slots[i].tscale.bytes && !w->slots[i].out.two_level)
            NBI_TRY(nbi_writer_put_tensor_scale(w, i, 1.0f, 0));
    return NB_OK;
}

enum nb_status nbi_writer_begin(struct nbi_writer **out, const struct nbi_writer_opts *opts,
                                const struct nbi_tensor_spec *tensors, int64_t count)
{
    *out = NULL;
    struct nbi_writer *w = calloc(1, sizeof *w);
    if (!w)
        return nbi_fail_memory("writer", sizeof *w);
    w->opts = *opts;
    w->count = count;
    w->path = strdup(opts->path);
    w->slots = calloc((size_t)count + 1, sizeof *w->slots);
    enum nb_status rc =
        w->path && w->slots ? fill_slots(w, tensors) : nbi_fail_memory("writer", sizeof *w->slots);
    if (rc == NB_OK) {
        w->file_count = assign_files(w, opts->shard_bytes);
        rc = open_files(w);
    }
    if (rc == NB_OK)
        rc = emit_files(w);
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

static enum nb_status put_bytes(struct nbi_writer *w, struct nbi_out_tensor *slot,
                                const struct nbi_extent *place, uint64_t at, const void *bytes,
                                size_t len)
{
    NBI_BUG_IF(at > place->bytes || len > place->bytes - at);
    NBI_TRY(nbi_outfile_write(w->files[slot->file], place->offset + at, bytes, len));
    atomic_fetch_add(&slot->written, len);
    return NB_OK;
}

enum nb_status nbi_writer_put(struct nbi_writer *w, int64_t index, int64_t first, int64_t count,
                              const void *values)
{
    struct nbi_out_tensor *slot = &w->slots[index];
    NBI_BUG_IF(slot->out.dtype == NBI_NVFP4);
    uint64_t size = (uint64_t)nbi_dtypes[slot->out.dtype].bytes;
    return put_bytes(w, slot, &slot->data, (uint64_t)first * size, values, (size_t)count * size);
}

static enum nb_status put_gguf(struct nbi_writer *w, struct nbi_out_tensor *slot, int64_t first,
                               int64_t count, const uint8_t *codes, const uint8_t *scales)
{
    size_t bytes = (size_t)count / 64 * 36;
    uint8_t *blocks = malloc(bytes + 1);
    if (!blocks)
        return nbi_fail_memory("NVFP4 blocks", bytes);
    nbi_nvfp4_to_gguf(blocks, codes, scales, count / 64);
    enum nb_status rc = put_bytes(w, slot, &slot->data, (uint64_t)first / 64 * 36, blocks, bytes);
    free(blocks);
    return rc;
}

enum nb_status nbi_writer_put_nvfp4(struct nbi_writer *w, int64_t index, int64_t first,
                                    int64_t count, const uint8_t *codes, const uint8_t *scales)
{
    struct nbi_out_tensor *slot = &w->slots[index];
    NBI_BUG_IF(slot->out.dtype != NBI_NVFP4 || first % 64 != 0 || count % NBI_NVFP4_BLOCK != 0);
    if (w->opts.format == NBI_FORMAT_GGUF)
        return put_gguf(w, slot, first, count, codes, scales);
    NBI_TRY(put_bytes(w, slot, &slot->data, (uint64_t)first / 2, codes, (size_t)count / 2));
    return put_bytes(w, slot, &slot->scale, (uint64_t)first / NBI_NVFP4_BLOCK, scales,
                     (size_t)count / NBI_NVFP4_BLOCK);
}

enum nb_status nbi_writer_put_tensor_scale(struct nbi_writer *w, int64_t index, float scale,
                                           float divisor)
{
    struct nbi_out_tensor *slot = &w->slots[index];
    NBI_BUG_IF(slot->tscale.bytes != 4);
    bool reciprocal =
        w->opts.format == NBI_FORMAT_SAFETENSORS && w->opts.layout == NBI_LAYOUT_COMPRESSED_TENSORS;
    float stored = !reciprocal ? scale : divisor != 0 ? divisor : 1.0f / scale;
    if (!isnormal(stored) || stored < 0)
        return nbi_fail(NB_EVALUE, "tensor scale %g of '%s' cannot be stored", (double)scale,
                        slot->out.name);
    return put_bytes(w, slot, &slot->tscale, 0, &stored, 4);
}

/* ---- commit ---- */

static enum nb_status write_index(const struct nbi_writer *w)
{
    json_t *map = json_object();
    uint64_t total = 0;
    bool ok = true;
    for (int64_t i = 0; i < w->count; i++) {
        struct nbi_out_tensor *s = &w->slots[i];
        struct nbi_st_part parts[3];
        int n = nbi_safetensors_parts(s, w->opts.layout, parts);
        for (int k = 0; k < n; k++)
            nbi_json_set(map, parts[k].name, json_string(w->file_names[s->file]), &ok);
        total += s->data.bytes + s->scale.bytes + s->tscale.bytes;
    }
    json_t *index =
        json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *path = nbi_path_join(w->path, "model.safetensors.index.json");
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
        const struct nbi_out_tensor *s = &w->slots[i];
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
