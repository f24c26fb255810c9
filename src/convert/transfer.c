/* transfer.c - the streaming loops of convert and quantize. */
#include "convert/transfer.h"

#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "base/sys.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define CHUNK     ((int64_t)1 << 19) /* values; 2 MiB of f32 */
#define L1_VALUES ((int64_t)1 << 12) /* values that stay in the L1 cache; 16 KiB of f32 */

struct nbi_buffers {
    float *f32;     /* CHUNK values */
    uint8_t *raw;   /* CHUNK values of the largest type */
    uint8_t *codes; /* CHUNK / 2 bytes */
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

/* One tensor's transfer, shared by the chunk functions below. */
struct chunk_ctx {
    struct nbi_transfer *t;
    const struct nbi_manifest_entry *item;
    int64_t index;
    struct nbi_quant_sums *chunk_sums; /* per chunk, so that the total does not depend on threads */
    float *chunk_amax;
};

static enum nb_status copy_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunk_ctx *c = ctx;
    uint8_t *raw = c->t->buffers[thread].raw;
    NBI_TRY(nbi_store_read(c->t->store, c->item->src, first, count, raw));
    return nbi_writer_put(c->t->writer, c->index, first, count, raw);
}

static enum nb_status copy_nvfp4_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunk_ctx *c = ctx;
    struct nbi_buffers *b = &c->t->buffers[thread];
    NBI_TRY(nbi_store_read_nvfp4(c->t->store, c->item->src, first, count, b->codes, b->scales));
    return nbi_writer_put_nvfp4(c->t->writer, c->index, first, count, b->codes, b->scales);
}

/* f16 ends at 65504. A finite value that would become infinite is an error. */
static enum nb_status check_f16_range(const struct chunk_ctx *c, const float *x, int64_t count)
{
    float amax = nbi_codec_table()->amax(x, count);
    if (isfinite(amax) && amax >= 65520.0f)
        return nbi_fail(NB_EVALUE, "tensor '%s' holds %g, too large for f16; use bf16 or f32",
                        c->item->out.name, (double)amax);
    return NB_OK;
}

static enum nb_status cast_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunk_ctx *c = ctx;
    struct nbi_buffers *b = &c->t->buffers[thread];
    const struct nbi_codec_table *k = nbi_codec_table();
    NBI_TRY(nbi_store_read_f32(c->t->store, c->item->src, first, count, b->f32));
    if (c->item->out.dtype == NBI_F32)
        return nbi_writer_put(c->t->writer, c->index, first, count, b->f32);
    if (c->item->out.dtype == NBI_F16) {
        NBI_TRY(check_f16_range(c, b->f32, count));
        k->f32_to_f16((uint16_t *)(void *)b->raw, b->f32, count);
    } else {
        k->f32_to_bf16((uint16_t *)(void *)b->raw, b->f32, count);
    }
    return nbi_writer_put(c->t->writer, c->index, first, count, b->raw);
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
    struct chunk_ctx *c = ctx;
    float *x = c->t->buffers[thread].f32;
    NBI_TRY(nbi_store_read_f32(c->t->store, c->item->src, first, count, x));
    return nbi_check_finite(c->item->src->name, x, first, count, &c->chunk_amax[first / CHUNK]);
}

static enum nb_status quantize_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct chunk_ctx *c = ctx;
    struct nbi_buffers *b = &c->t->buffers[thread];
    float amax, decoded[L1_VALUES], scale = c->item->out.two_level ? c->item->tensor_scale : 1.0f;
    double sums[3] = {0};
    NBI_TRY(nbi_store_read_f32(c->t->store, c->item->src, first, count, b->f32));
    NBI_TRY(nbi_check_finite(c->item->src->name, b->f32, first, count, &amax));
    for (int64_t i = 0; i < count; i += L1_VALUES) {
        int64_t n = count - i < L1_VALUES ? count - i : L1_VALUES, blocks = n / NBI_NVFP4_BLOCK;
        uint8_t *q = b->codes + i / 2, *s = b->scales + i / NBI_NVFP4_BLOCK;
        nbi_nvfp4_quantize(q, s, b->f32 + i, blocks, c->t->method, scale);
        nbi_nvfp4_dequantize_f32(decoded, q, s, blocks, scale);
        nbi_codec_table()->error(b->f32 + i, decoded, n, sums);
    }
    c->chunk_sums[first / CHUNK] = (struct nbi_quant_sums){sums[0], sums[1], sums[2], count};
    return nbi_writer_put_nvfp4(c->t->writer, c->index, first, count, b->codes, b->scales);
}

static enum nb_status run_quantize(struct chunk_ctx *c, struct nbi_quant_sums *sums)
{
    int64_t count = c->item->src->count, chunks = (count + CHUNK - 1) / CHUNK;
    c->chunk_sums = calloc((size_t)chunks + 1, sizeof *c->chunk_sums);
    if (!c->chunk_sums)
        return nbi_fail_memory("sums", (size_t)chunks * sizeof *c->chunk_sums);
    enum nb_status rc = nbi_for_chunks(count, CHUNK, c->t->threads, quantize_chunk, c);
    for (int64_t i = 0; i < chunks; i++) {
        sums->error += c->chunk_sums[i].error;
        sums->signal += c->chunk_sums[i].signal;
        sums->zeros += c->chunk_sums[i].zeros;
        sums->values += c->chunk_sums[i].values;
    }
    free(c->chunk_sums);
    return rc;
}

enum nb_status nbi_transfer_entry(struct nbi_transfer *t, const struct nbi_manifest_entry *item,
                                  int64_t index, struct nbi_quant_sums *sums)
{
    struct chunk_ctx c = {.t = t, .item = item, .index = index};
    const struct nbi_entry *src = item->src;
    enum nb_status rc;
    memset(sums, 0, sizeof *sums);
    if (item->out.dtype == NBI_NVFP4 && item->out.two_level)
        NBI_TRY(nbi_writer_put_tensor_scale(t->writer, index, item->tensor_scale, item->divisor));
    if (item->out.dtype == NBI_NVFP4 && src->dtype == NBI_NVFP4)
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, copy_nvfp4_chunk, &c);
    else if (item->out.dtype == NBI_NVFP4)
        rc = run_quantize(&c, sums);
    else if (item->out.dtype == src->dtype)
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, copy_chunk, &c);
    else
        rc = nbi_for_chunks(src->count, CHUNK, t->threads, cast_chunk, &c);
    t->done += nbi_entry_bytes(src);
    if (t->progress)
        t->progress(t->progress_ctx, t->done, t->total);
    return rc;
}

enum nb_status nbi_transfer_amax(struct nbi_transfer *t, const struct nbi_entry *e, float *amax)
{
    struct nbi_manifest_entry item = {.src = e};
    struct chunk_ctx c = {.t = t, .item = &item};
    int64_t chunks = (e->count + CHUNK - 1) / CHUNK;
    c.chunk_amax = calloc((size_t)chunks + 1, sizeof *c.chunk_amax);
    if (!c.chunk_amax)
        return nbi_fail_memory("maxima", (size_t)chunks * sizeof *c.chunk_amax);
    enum nb_status rc = nbi_for_chunks(e->count, CHUNK, t->threads, amax_chunk, &c);
    *amax = 0;
    for (int64_t i = 0; i < chunks; i++)
        *amax = fmaxf(*amax, c.chunk_amax[i]);
    free(c.chunk_amax);
    return rc;
}
