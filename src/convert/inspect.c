/* inspect.c - the public functions on an opened model file. */
#include <string.h>

#include "convert/verify.h"

struct nb_file {
    struct nbi_model model;
};

enum nb_status nb_file_open(struct nb_file **out, const char *path, const char *model_dir)
{
    *out = NULL;
    struct nb_file *f = calloc(1, sizeof *f);
    if (!f)
        return nbi_fail_memory("file", sizeof *f);
    enum nb_status rc = nbi_model_open(&f->model, path, model_dir);
    if (rc != NB_OK) {
        free(f);
        return rc;
    }
    *out = f;
    return NB_OK;
}

void nb_file_close(struct nb_file *file)
{
    if (!file)
        return;
    nbi_model_close(&file->model);
    free(file);
}

const char *nb_file_format(const struct nb_file *file)
{
    return nbi_formats[file->model.store->format].name;
}

const char *nb_file_layout(const struct nb_file *file)
{
    return nbi_layouts[file->model.store->layout].name;
}

int64_t nb_file_tensor_count(const struct nb_file *file)
{
    return file->model.store->count;
}

void nb_file_tensor(const struct nb_file *file, int64_t index, struct nb_tensor_info *info)
{
    const struct nbi_store *store = file->model.store;
    const struct nbi_entry *e = &store->entries[index];
    *info = (struct nb_tensor_info){.name = e->name,
                                    .dtype = nbi_dtypes[e->dtype].name,
                                    .ndim = e->ndim,
                                    .bytes = nbi_entry_bytes(e),
                                    .offset = e->data.offset,
                                    .tensor_scale = 1.0f};
    memcpy(info->shape, e->shape, sizeof e->shape);
    info->file = nbi_path_base(nbi_source_path(store->files[e->data.file]));
    if (e->dtype == NBI_NVFP4) {
        info->tensor_scale = e->tensor_scale;
        info->scaling = store->layout == NBI_LAYOUT_GGUF ? nbi_dtypes[NBI_E4M3].name
                                                         : nbi_dtypes[e->scale_dtype].name;
    }
}

uint64_t nb_file_bytes(const struct nb_file *file)
{
    uint64_t n = 0;
    for (int i = 0; i < file->model.store->file_count; i++)
        n += nbi_source_size(file->model.store->files[i]);
    return n;
}

int64_t nb_file_meta_count(const struct nb_file *file)
{
    return file->model.store->meta_count;
}

void nb_file_meta(const struct nb_file *file, int64_t index, const char **key, const char **value)
{
    *key = file->model.store->meta[index].key;
    *value = file->model.store->meta[index].value;
}

enum nb_status nb_file_verify(struct nb_file *file, int threads, nb_progress_fn progress,
                              void *progress_ctx, struct nb_cancel *cancel)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(cancel);
    return nbi_verify(&file->model, threads, progress, progress_ctx);
}
