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

void nb_file_info(const struct nb_file *file, struct nb_file_info *info)
{
    const struct nbi_store *store = file->model.store;
    *info = (struct nb_file_info){.format = nbi_formats[store->format].name,
                                  .layout = nbi_layouts[store->layout].name,
                                  .tensors = store->count,
                                  .metadata = store->meta_count};
    for (int i = 0; i < store->file_count; i++)
        info->bytes += nbi_source_size(store->files[i]);
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
