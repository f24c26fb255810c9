/* kv_cache.h - the keys and values of all layers, for a session or for a batch.
 *
 * Row r holds the key and the value of one token, in every layer at the same index. A session
 * (session.c) has a row for each position of its context. A batch (batch.c) divides the rows into
 * pages of NBI_PAGE, and each of its sequences has a table of its pages. */
#pragma once

#include "infer/engine.h"

/* ---- types and sizes ---- */

/* Tokens of a context if none is asked for; fewer if the model was made for fewer. */
#define NBI_CONTEXT_DEFAULT 4096

/* context, or the default if it is 0. */
int64_t nbi_context_or_default(const struct nbi_config *c, int64_t context);

/* Fails if the context is longer than what the model was made for. */
enum nb_status nbi_check_context(const struct nbi_config *c, int64_t context);

#define NBI_KV_TYPES (NB_KV_F8 + 1)

/* The element types of a cache, in the order of enum nb_kv_dtype. */
struct nbi_kv_type {
    enum nbi_dtype dtype;
    const char *name; /* of the option --kv-dtype */
};

extern const struct nbi_kv_type nbi_kv_types[NBI_KV_TYPES];

/* NB_EINVAL for a number that is no type. */
enum nb_status nbi_kv_dtype(enum nb_kv_dtype kv, enum nbi_dtype *out);

/* The number of pages that `tokens` tokens need. */
static inline int64_t nbi_kv_pages(int64_t tokens)
{
    return (tokens + NBI_PAGE - 1) / NBI_PAGE;
}

/* The row of a token in a paged cache; table: the pages of its sequence. */
static inline int32_t nbi_kv_paged_row(const int32_t *table, int64_t position)
{
    return (int32_t)(table[position / NBI_PAGE] * NBI_PAGE + position % NBI_PAGE);
}

/* ---- the cache ---- */

struct nbi_kv_cache {
    struct nbi_backend *be;
    enum nbi_dtype dtype;
    int64_t layers;
    int64_t row_bytes;         /* of the key of one token in one layer, or of its value */
    int64_t array_bytes;       /* of all keys of one layer, or all values */
    struct nbi_ptr block;      /* [layers][keys, values] */
    struct nbi_kv_view *views; /* [layers], as a pass takes them */
};

enum nb_status nbi_kv_cache_init(struct nbi_kv_cache *kv, struct nbi_backend *be,
                                 const struct nbi_config *c, enum nbi_dtype dtype, int64_t rows);
void nbi_kv_cache_release(struct nbi_kv_cache *kv); /* a zeroed one as well */

/* Queues a copy of the first `rows` rows to or from the host: [layers][keys, values][rows], of
 * row_bytes each. */
enum nb_status nbi_kv_cache_copy(const struct nbi_kv_cache *kv, struct nbi_stream *s, int64_t rows,
                                 uint8_t *host, bool to_host);

/* ---- what a session or a batch allocates ---- */

struct nbi_memory_plan {
    int64_t kv, activations; /* of the backend's memory */
    int64_t scratch;         /* of the stream */
    int64_t host;            /* of malloc() */
};

/* host: bytes that the caller allocates itself; those of cache and activations are added. */
void nbi_memory_plan(const struct nb_engine *engine, const struct nbi_acts_opts *acts,
                     enum nbi_dtype dtype, int64_t rows, int64_t host,
                     struct nbi_memory_plan *plan);
