/* export.c - writes the trained model: exactly the weights that the last forward pass used.
 *
 * What was written is read back and compared before it appears under its name. */
#include <string.h>

#include "convert/model_writer.h"
#include "tensor/codec.h"
#include "train/run.h"

#define CHUNK_ROWS 256

static struct nbi_tensor_spec spec_of(const struct nbi_train_param *x)
{
    return (struct nbi_tensor_spec){.name = x->param.name,
                                    .dtype = x->quantized ? NBI_NVFP4 : x->float_type,
                                    .ndim = x->param.ndim,
                                    .shape = {x->param.shape[0], x->param.shape[1]},
                                    .two_level = x->has_tensor_scale};
}

/* The type a tensor is stored in at the source: a frozen one may be in a larger type in memory. */
static enum nbi_dtype original_type(const struct nbi_run *r, const struct nbi_train_param *x)
{
    const struct nbi_entry *e =
        x->trained || !r->model.store ? NULL : nbi_store_find(r->model.store, x->param.name);
    return e ? e->dtype : x->float_type;
}

/* Lays out the result and begins to write it. */
static enum nb_status begin(struct nbi_model_writer *x, const struct nbi_run *r,
                            const struct nbi_train_param *tensors, int64_t count)
{
    const struct nb_convert_opts opts = {
        .src = r->opts->model, .dst = r->opts->out, .model_dir = r->opts->model_dir};
    struct nbi_manifest_entry *items = calloc((size_t)count, sizeof *items);
    if (!items)
        return nbi_fail_memory("export", (size_t)count * sizeof *items);
    for (int64_t i = 0; i < count; i++)
        items[i] = (struct nbi_manifest_entry){.out = spec_of(&tensors[i]),
                                               .original_type = original_type(r, &tensors[i]),
                                               .order = i};
    enum nb_status rc = nbi_model_writer_begin(x, &opts, &r->model, items, count);
    free(items);
    return rc;
}

enum nb_status nbi_run_check_export(const struct nbi_run *r,
                                    const struct nbi_train_params_opts *opts)
{
    const struct nbi_store *store = r->opts->from_scratch ? NULL : r->model.store;
    int64_t count = 0, limit = nbi_param_count(&r->config) + 1;
    struct nbi_train_param *tensors = calloc((size_t)limit, sizeof *tensors);
    struct nbi_model_writer x;
    if (!tensors)
        return nbi_fail_memory("export", (size_t)limit * sizeof *tensors);
    while (nbi_train_params_at(&r->config, store, opts, count, &tensors[count]))
        if (++count == limit)
            break;
    enum nb_status rc = begin(&x, r, tensors, count);
    if (rc == NB_OK)
        nbi_model_writer_abort(&x);
    free(tensors);
    return rc;
}

/* Writes rows of a float weight. A vector is f32 in memory, but its values fit the written type. */
static enum nb_status put_floats(struct nbi_writer *w, struct nbi_run *r, int64_t index,
                                 const struct nbi_train_param *x, int64_t first, int64_t rows,
                                 void *buf)
{
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1;
    NBI_TRY(r->be->weight_read(r->be, x->weight, first, rows, buf, NULL));
    uint16_t *half = (uint16_t *)buf + 2 * rows * cols;
    if (x->weight->dtype == x->float_type)
        return nbi_writer_put(w, index, first * cols, rows * cols, buf);
    (x->float_type == NBI_BF16 ? nbi_codec_table()->f32_to_bf16
                               : nbi_codec_table()->f32_to_f16)(half, buf, rows * cols);
    return nbi_writer_put(w, index, first * cols, rows * cols, half);
}

static enum nb_status put_tensor(struct nbi_writer *w, struct nbi_run *r, int64_t index)
{
    const struct nbi_train_param *x = &r->params.tensors[index];
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, rows = x->param.shape[0];
    int64_t step = x->param.ndim == 2 ? CHUNK_ROWS : rows;
    uint8_t *buf = malloc((size_t)(step * cols * 6));
    enum nb_status rc = buf ? NB_OK : nbi_fail_memory(x->param.name, (size_t)(step * cols * 6));
    if (rc == NB_OK && x->has_tensor_scale)
        rc = nbi_writer_put_tensor_scale(w, index, x->weight->tensor_scale, x->divisor);
    for (int64_t i = 0; i < rows && rc == NB_OK; i += step) {
        int64_t n = rows - i < step ? rows - i : step;
        if (x->weight->dtype != NBI_NVFP4) {
            rc = put_floats(w, r, index, x, i, n, buf);
            continue;
        }
        uint8_t *scales = buf + n * cols / 2;
        rc = r->be->weight_read(r->be, x->weight, i, n, buf, scales);
        if (rc == NB_OK)
            rc = nbi_writer_put_nvfp4(w, index, i * cols, n * cols, buf, scales);
    }
    free(buf);
    return rc;
}

/* ---- comparing the files with the weights ---- */

/* Whether the stored rows [first, first + n) equal those in memory, bit for bit. */
static enum nb_status same_rows(struct nbi_run *r, const struct nbi_store *store,
                                const struct nbi_train_param *x, int64_t first, int64_t n,
                                uint8_t *buf)
{
    const struct nbi_entry *e = nbi_store_find(store, x->param.name);
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, count = n * cols;
    uint8_t *used = buf, *stored = buf + 4 * count;
    if (!e || e->count != x->count || (e->dtype == NBI_NVFP4) != x->quantized ||
        (x->quantized && e->tensor_scale != x->weight->tensor_scale))
        return nbi_fail(NB_EFORMAT, "'%s' is not there as it was written", x->param.name);
    NBI_TRY(r->be->weight_read(r->be, x->weight, first, n, used, used + count / 2));
    size_t bytes = (size_t)count * sizeof(float);
    if (x->quantized) {
        bytes = (size_t)(count / 2 + count / 16);
        NBI_TRY(nbi_store_read_nvfp4(store, e, first * cols, count, stored, stored + count / 2));
    } else {
        float *used_f32 = (float *)(void *)(buf + 8 * count);
        NBI_TRY(nbi_store_read_f32(store, e, first * cols, count, (float *)(void *)stored));
        if (x->weight->dtype == NBI_BF16)
            nbi_codec_table()->bf16_to_f32(used_f32, (const uint16_t *)(const void *)used, count);
        else if (x->weight->dtype == NBI_F16)
            nbi_codec_table()->f16_to_f32(used_f32, (const uint16_t *)(const void *)used, count);
        used = x->weight->dtype == NBI_F32 ? used : (uint8_t *)used_f32;
    }
    if (memcmp(used, stored, bytes) != 0)
        return nbi_fail(NB_EFORMAT, "'%s' differs from what was trained", x->param.name);
    return NB_OK;
}

static enum nb_status check_tensor(struct nbi_run *r, const struct nbi_store *store,
                                   const struct nbi_train_param *x)
{
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, rows = x->param.shape[0];
    int64_t step = x->param.ndim == 2 ? CHUNK_ROWS : rows;
    uint8_t *buf = malloc((size_t)(step * cols * 12));
    enum nb_status rc = buf ? NB_OK : nbi_fail_memory(x->param.name, (size_t)(step * cols * 12));
    for (int64_t i = 0; i < rows && rc == NB_OK; i += step)
        rc = same_rows(r, store, x, i, rows - i < step ? rows - i : step, buf);
    free(buf);
    return rc;
}

static enum nb_status check_output(struct nbi_run *r, struct nbi_model_writer *x)
{
    struct nbi_store *store = NULL;
    enum nb_status rc = nbi_model_writer_reopen(x, &store);
    for (int64_t i = 0; i < r->params.count && rc == NB_OK; i++) {
        rc = check_tensor(r, store, &r->params.tensors[i]);
        nbi_run_stage_progress(r, r->params.count + i + 1, 2 * r->params.count);
    }
    nbi_store_close(store);
    return nbi_context(rc, "reading what was written for '%s'", r->opts->out);
}

enum nb_status nbi_run_export(struct nbi_run *r)
{
    struct nbi_model_writer x;
    nbi_run_stage(r, "writing the result");
    NBI_TRY(begin(&x, r, r->params.tensors, r->params.count));
    enum nb_status rc = NB_OK;
    for (int64_t i = 0; i < r->params.count && rc == NB_OK; i++) {
        rc = put_tensor(x.writer, r, i);
        nbi_run_stage_progress(r, i + 1, 2 * r->params.count); /* the rest: reading it back */
    }
    if (rc == NB_OK)
        rc = check_output(r, &x);
    if (rc == NB_OK)
        return nbi_model_writer_commit(&x);
    nbi_model_writer_abort(&x);
    return rc;
}
