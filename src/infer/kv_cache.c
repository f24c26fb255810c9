/* kv_cache.c - one block of device memory: keys, then values, layer by layer. */
#include "infer/kv_cache.h"

const struct nbi_kv_type nbi_kv_types[NBI_KV_TYPES] = {
    [NB_KV_F32] = {NBI_F32, "f32"},
    [NB_KV_F16] = {NBI_F16, "f16"},
    [NB_KV_BF16] = {NBI_BF16, "bf16"},
    [NB_KV_F8] = {NBI_E4M3, "f8"},
};

enum nb_status nbi_kv_dtype(enum nb_kv_dtype kv, enum nbi_dtype *out)
{
    if ((unsigned)kv >= NBI_KV_TYPES)
        return nbi_fail(NB_EINVAL, "an unknown kind of cache");
    *out = nbi_kv_types[kv].dtype;
    return NB_OK;
}

int64_t nbi_context_or_default(const struct nbi_config *c, int64_t context)
{
    if (context > 0)
        return context;
    return c->max_position < NBI_CONTEXT_DEFAULT ? c->max_position : NBI_CONTEXT_DEFAULT;
}

enum nb_status nbi_check_context(const struct nbi_config *c, int64_t context)
{
    if (context > c->max_position)
        return nbi_fail(NB_EVALUE, "a context of %lld tokens; the model was made for %lld",
                        (long long)context, (long long)c->max_position);
    return NB_OK;
}

/* Bytes of one layer's keys, rounded up so that what follows stays aligned. */
static int64_t array_bytes(const struct nbi_config *c, enum nbi_dtype dtype, int64_t rows)
{
    return ((int64_t)nbi_dtype_bytes(dtype, rows * c->kv_heads * c->head_dim) + 63) / 64 * 64;
}

enum nb_status nbi_kv_cache_init(struct nbi_kv_cache *kv, struct nbi_backend *be,
                                 const struct nbi_config *c, enum nbi_dtype dtype, int64_t rows)
{
    int64_t bytes = array_bytes(c, dtype, rows);
    *kv = (struct nbi_kv_cache){.be = be, .dtype = dtype, .layers = c->layers};
    kv->array_bytes = bytes;
    kv->row_bytes = (int64_t)nbi_dtype_bytes(dtype, c->kv_heads * c->head_dim);
    kv->views = calloc((size_t)c->layers, sizeof *kv->views);
    if (!kv->views)
        return nbi_fail_memory("key/value cache", (size_t)c->layers * sizeof *kv->views);
    NBI_TRY(be->alloc(be, "key/value cache", 2 * c->layers * bytes, &kv->block));
    for (int64_t i = 0; i < c->layers; i++)
        kv->views[i] = (struct nbi_kv_view){nbi_ptr_add(kv->block, 2 * i * bytes),
                                            nbi_ptr_add(kv->block, (2 * i + 1) * bytes), dtype};
    return NB_OK;
}

void nbi_kv_cache_release(struct nbi_kv_cache *kv)
{
    if (kv->be)
        kv->be->free(kv->be, kv->block);
    free(kv->views);
    *kv = (struct nbi_kv_cache){0};
}

enum nb_status nbi_kv_cache_copy(const struct nbi_kv_cache *kv, struct nbi_stream *s, int64_t rows,
                                 uint8_t *host, bool to_host)
{
    int64_t bytes = rows * kv->row_bytes;
    for (int64_t i = 0; i < 2 * kv->layers; i++) {
        const struct nbi_ptr array = nbi_ptr_add(kv->block, i * kv->array_bytes);
        NBI_TRY(to_host ? kv->be->download(s, host + i * bytes, array, bytes)
                        : kv->be->upload(s, array, host + i * bytes, bytes));
    }
    return NB_OK;
}

/* ---- memory ---- */

void nbi_memory_plan(const struct nb_engine *engine, const struct nbi_acts_opts *acts,
                     enum nbi_dtype dtype, int64_t rows, int64_t host, struct nbi_memory_plan *plan)
{
    const struct nbi_config *c = &engine->config;
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, acts->N, false);
    *plan =
        (struct nbi_memory_plan){.kv = 2 * c->layers * array_bytes(c, dtype, rows),
                                 .activations = nbi_acts_bytes(c, acts),
                                 .scratch = engine->be->stream_bytes(engine->be, &limits),
                                 .host = host + c->layers * (int64_t)sizeof(struct nbi_kv_view) +
                                         nbi_acts_host_bytes(c, acts)};
}
