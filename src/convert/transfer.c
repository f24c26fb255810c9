/* transfer.c - the streaming loops behind convert and quantize. */
#include "convert/transfer.h"

#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "base/sys.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define CHUNK ((int64_t)1 << 19) /* values; 2 MiB of f32 */
#define PIECE ((int64_t)1 << 12) /* values that stay in the first-level cache, 16 KiB of f32 */

struct nbi_buffers {
    float *f32;     /* CHUNK */
    uint8_t *raw;   /* CHUNK * 8: the widest element */
    uint8_t *codes; /* CHUNK / 2 */
    uint8_t *scales;
};

enum nb_status nbi_transfer_init(struct nbi_transfer *t, const struct nb_convert_opts *opts,
                                 const struct nbi_store *store)
{
    *t = (struct nbi_transfer){.store = store,
                               .threads = opts->threads > 0 ? opts->threads : nbi_cpu_count(),
                               .progress = opts->progress,
                               .progress_ctx = opts->progress_ctx};
    t->buffers = calloc((size_t)t->threads, sizeof *t->buffers);
    bool ok = t->buffers != NULL;
    for (int i = 0; ok && i < t->threads; i++) {
        struct nbi_buffers *b = &t->buffers[i];
        b->f32 = malloc(CHUNK * sizeof *b->f32);
        b->raw = malloc(CHUNK * 8);
        b->codes = malloc(CHUNK / 2);
        b->scales = malloc(CHUNK / NBI_NVFP4_BLOCK);
        ok = b->f32 && b->raw && b->codes && b->scales;
    }
    if (ok)
        return NB_OK;
    nbi_transfer_release(t);
    return nbi_fail_memory("conversion buffers", (size_t)t->threads * CHUNK * 13);
}

void nbi_transfer_release(struct nbi_transfer *t)
{
    for (int i = 0; t->buffers && i < t->threads; i++) {
        free(t->buffers[i].f32);
        free(t->buffers[i].raw);
        free(t->buffers[i].codes);
        free(t->buffers[i].scales);
    }
    free(t->buffers);
    t->buffers = NULL;
}

/* A tensor on its way; the chunk functions below share it. */
struct job {
    struct nbi_transfer *t;
    const struct nbi_manifest_entry *item;
    int64_t index;
    struct nbi_quant_sums *chunk_sums; /* one a chunk: the total does not depend on threads */
    float *chunk_amax;
};

static enum nb_status copy_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct job *j = ctx;
    uint8_t *raw = j->t->buffers[thread].raw;
    NBI_TRY(nbi_store_read(j->t->store, j->item->src, first, count, raw));
    return nbi_writer_put(j->t->writer, j->index, first, count, raw);
}

static enum nb_status copy_nvfp4_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct job *j = ctx;
    struct nbi_buffers *b = &j->t->buffers[thread];
    NBI_TRY(nbi_store_read_nvfp4(j->t->store, j->item->src, first, count, b->codes, b->scales));
    return nbi_writer_put_nvfp4(j->t->writer, j->index, first, count, b->codes, b->scales);
}

/* f16 ends at 65504; a finite value that would become infinite is an error, not a surprise. */
static enum nb_status check_f16_range(const struct job *j, const float *x, int64_t count)
{
    float amax = nbi_codec_table()->amax(x, count);
    if (isfinite(amax) && amax >= 65520.0f)
        return nbi_fail(NB_EVALUE, "tensor '%s' holds %g, too large for f16; use bf16 or f32",
                        j->item->out.name, (double)amax);
    return NB_OK;
}

static enum nb_status cast_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct job *j = ctx;
    struct nbi_buffers *b = &j->t->buffers[thread];
    const struct nbi_codec_table *k = nbi_codec_table();
    NBI_TRY(nbi_store_read_f32(j->t->store, j->item->src, first, count, b->f32));
    if (j->item->out.dtype == NBI_F32)
        return nbi_writer_put(j->t->writer, j->index, first, count, b->f32);
    if (j->item->out.dtype == NBI_F16) {
        NBI_TRY(check_f16_range(j, b->f32, count));
        k->f32_to_f16((uint16_t *)(void *)b->raw, b->f32, count);
    } else {
        k->f32_to_bf16((uint16_t *)(void *)b->raw, b->f32, count);
    }
    return nbi_writer_put(j->t->writer, j->index, first, count, b->raw);
}

enum nb_status nbi_check_finite(const char *name, const float *x, int64_t first, int64_t count,
                                float *amax)
{
    *amax = nbi_codec_table()->amax(x, count);
    if (isfinite(*amax))
        return NB_OK;
    int64_t i = 0;
    while (isfinite(x[i]))
        i++;
    return nbi_fail(NB_EVALUE, "tensor '%s' holds %s at element %lld", name,
                    isnan(x[i]) ? "NaN" : "infinity", (long long)(first + i));
}

static enum nb_status amax_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct job *j = ctx;
    float *x = j->t->buffers[thread].f32;
    NBI_TRY(nbi_store_read_f32(j->t->store, j->item->src, first, count, x));
    return nbi_check_finite(j->item->src->name, x, first, count, &j->chunk_amax[first / CHUNK]);
}

static enum nb_status quantize_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct job *j = ctx;
    struct nbi_buffers *b = &j->t->buffers[thread];
    float amax, back[PIECE], scale = j->item->out.two_level ? j->item->tensor_scale : 1.0f;
    double sums[3] = {0};
    NBI_TRY(nbi_store_read_f32(j->t->store, j->item->src, first, count, b->f32));
    NBI_TRY(nbi_check_finite(j->item->src->name, b->f32, first, count, &amax));
    for (int64_t i = 0; i < count; i += PIECE) {
        int64_t n = count - i < PIECE ? count - i : PIECE, blocks = n / NBI_NVFP4_BLOCK;
        uint8_t *q = b->codes + i / 2, *s = b->scales + i / NBI_NVFP4_BLOCK;
        nbi_nvfp4_quantize(q, s, b->f32 + i, blocks, j->t->method, scale);
        nbi_nvfp4_dequantize_f32(back, q, s, blocks, scale);
        nbi_codec_table()->error(b->f32 + i, back, n, sums);
    }
    j->chunk_sums[first / CHUNK] = (struct nbi_quant_sums){sums[0], sums[1], sums[2], count};
    return nbi_writer_put_nvfp4(j->t->writer, j->index, first, count, b->codes, b->scales);
}

static enum nb_status run_quantize(struct job *j, struct nbi_quant_sums *sums)
{
    int64_t count = j->item->src->count, chunks = (count + CHUNK - 1) / CHUNK;
    j->chunk_sums = calloc((size_t)chunks + 1, sizeof *j->chunk_sums);
    if (!j->chunk_sums)
        return nbi_fail_memory("sums", (size_t)chunks * sizeof *j->chunk_sums);
    enum nb_status rc = nbi_for_chunks(count, CHUNK, j->t->threads, quantize_chunk, j);
    for (int64_t i = 0; i < chunks; i++) {
        sums->error += j->chunk_sums[i].error;
        sums->signal += j->chunk_sums[i].signal;
        sums->zeros += j->chunk_sums[i].zeros;
        sums->values += j->chunk_sums[i].values;
    }
    free(j->chunk_sums);
    return rc;
}

enum nb_status nbi_transfer_entry(struct nbi_transfer *t, const struct nbi_manifest_entry *item,
                                  int64_t index, struct nbi_quant_sums *sums)
{
    struct job j = {.t = t, .item = item, .index = index};
    const struct nbi_entry *src = item->src;
    enum nb_status rc;
    memset(sums, 0, sizeof *sums);
    if (item->out.dtype == NBI_NVFP4 && item->out.two_level)
        NBI_TRY(nbi_writer_put_tensor_scale(t->writer, index, item->tensor_scale, item->divisor));
    if (item->out.dtype == NBI_NVFP4 && src->dtype == NBI_NVFP4)
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, copy_nvfp4_chunk, &j);
    else if (item->out.dtype == NBI_NVFP4)
        rc = run_quantize(&j, sums);
    else if (item->out.dtype == src->dtype)
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, copy_chunk, &j);
    else
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, cast_chunk, &j);
    t->done += nbi_entry_bytes(src);
    if (t->progress)
        t->progress(t->progress_ctx, t->done, t->total);
    return rc;
}

enum nb_status nbi_transfer_amax(struct nbi_transfer *t, const struct nbi_entry *e, float *amax)
{
    struct nbi_manifest_entry item = {.src = e};
    struct job j = {.t = t, .item = &item};
    int64_t chunks = (e->count + CHUNK - 1) / CHUNK;
    j.chunk_amax = calloc((size_t)chunks + 1, sizeof *j.chunk_amax);
    if (!j.chunk_amax)
        return nbi_fail_memory("maxima", (size_t)chunks * sizeof *j.chunk_amax);
    enum nb_status rc = nbi_for_chunks(e->count, CHUNK, t->threads, amax_chunk, &j);
    *amax = 0;
    for (int64_t i = 0; i < chunks; i++)
        *amax = fmaxf(*amax, j.chunk_amax[i]);
    free(j.chunk_amax);
    return rc;
}
