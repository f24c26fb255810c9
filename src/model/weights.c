/* weights.c - loads the weights of a model into a backend, in the types in which they are stored.
 *
 * A failed load leaves nothing behind. */
#include <math.h>
#include <string.h>

#include "model/weights.h"

/* ---- rope ---- */

/* The dimension whose pair makes this many rotations over the original context. */
static double dim_of_rotations(const struct nbi_config *c, double rotations)
{
    double d = (double)c->head_dim;
    return d * log((double)c->yarn_original / (rotations * 2 * M_PI)) / (2 * log(c->rope_theta));
}

/* YaRN: pairs that rotate slowly are stretched by the factor, fast ones stay as they are, and those
 * between are blended. 32 and 1 are beta_fast and beta_slow. */
static double yarn_frequency(const struct nbi_config *c, int64_t i, double frequency)
{
    double low = floor(dim_of_rotations(c, 32)), high = ceil(dim_of_rotations(c, 1));
    double last = (double)c->head_dim - 1;
    low = low < 0 ? 0 : low;
    high = high > last ? last : high;
    if (low == high)
        high += 0.001;
    double ramp = ((double)i - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return frequency / c->yarn_factor * ramp + frequency * (1 - ramp);
}

static enum nb_status send_frequencies(struct nbi_weights *w, const float *f, int64_t bytes)
{
    struct nbi_backend *be = w->be;
    struct nbi_stream *s = NULL;
    enum nb_status rc =
        be->stream_new(be, &(struct nbi_stream_limits){.N = 1, .K = 32, .D = 32}, &s);
    if (rc == NB_OK)
        rc = be->alloc(be, "rotation", bytes, &w->frequency);
    if (rc == NB_OK)
        rc = be->upload(s, w->frequency, f, bytes);
    if (rc == NB_OK)
        rc = be->sync(s);
    be->stream_free(s);
    return rc;
}

static enum nb_status load_frequencies(struct nbi_weights *w)
{
    const struct nbi_config *c = w->config;
    int64_t half = c->head_dim / 2, bytes = nbi_frequency_bytes(c);
    float *f = malloc((size_t)bytes);
    if (!f)
        return nbi_fail_memory("rotation", (size_t)bytes);
    for (int64_t i = 0; i < half; i++) {
        double frequency = 1 / pow(c->rope_theta, 2 * (double)i / (double)c->head_dim);
        f[i] = (float)(c->yarn_factor > 0 ? yarn_frequency(c, i, frequency) : frequency);
    }
    w->rope_scale = c->yarn_factor > 1 ? (float)(0.1 * log(c->yarn_factor) + 1) : 1.0f;
    enum nb_status rc = send_frequencies(w, f, bytes);
    free(f);
    return rc;
}

/* ---- from a store ---- */

/* Where nbi_weight_source reads from. */
struct rows {
    const struct nbi_store *store;
    const struct nbi_entry *entry;
    int64_t cols; /* 0: a vector */
};

static enum nb_status read_rows(void *ctx, int64_t first, int64_t count, void *data, void *scales)
{
    const struct rows *r = ctx;
    int64_t cols = r->cols > 0 ? r->cols : 1;
    NBI_TRY(nbi_check_interrupt());
    if (r->entry->dtype == NBI_NVFP4) {
        const uint8_t *scale = scales;
        NBI_TRY(nbi_store_read_nvfp4(r->store, r->entry, first * cols, count * cols, data, scales));
        for (int64_t i = 0; i < count * cols / 16; i++)
            if (scale[i] >= 0x7F) /* E4M3: NaN, or the sign bit is set */
                return nbi_fail(NB_EVALUE, "a block scale is negative or not a number");
        return NB_OK;
    }
    return nbi_store_read(r->store, r->entry, first * cols, count * cols, data);
}

static enum nb_status check_entry(const struct nbi_entry *e, const struct nbi_param *p)
{
    if (!nbi_param_fits(p, e))
        return nbi_fail(NB_EFORMAT, "its shape is not the one the config asks for");
    if (e->dtype != NBI_NVFP4 && !nbi_dtype_is_float(e->dtype))
        return nbi_fail(NB_EUNSUPPORTED, "weights of type %s", nbi_dtypes[e->dtype].name);
    if (e->dtype == NBI_NVFP4 && !(p->def->flags & NBI_QUANT))
        return nbi_fail(NB_EUNSUPPORTED, "only projections and the head may be NVFP4");
    return NB_OK;
}

bool nbi_weight_is_lookup(const struct nbi_store *store, const struct nbi_param *p)
{
    return store && p->def->flags & NBI_GATHER && nbi_store_find(store, nbi_head_name());
}

static enum nb_status load_entry(struct nbi_backend *be, struct nbi_store *store,
                                 const struct nbi_param *p, const struct nbi_entry *e,
                                 const struct nbi_weight_memory *memory, struct nbi_weight *out)
{
    struct rows rows = {store, e, p->shape[1]};
    NBI_TRY(check_entry(e, p));
    const struct nbi_weight_source src = {.dtype = e->dtype,
                                          .rows = p->shape[0],
                                          .cols = rows.cols,
                                          .tensor_scale =
                                              e->dtype == NBI_NVFP4 ? e->tensor_scale : 1.0f,
                                          .read = read_rows,
                                          .ctx = &rows,
                                          .lookup = nbi_weight_is_lookup(store, p),
                                          .memory = memory};
    return be->weight_new(be, &src, out);
}

enum nb_status nbi_weight_load(struct nbi_store *store, struct nbi_backend *be,
                               const struct nbi_param *p, const struct nbi_weight_memory *memory,
                               struct nbi_weight *out)
{
    const struct nbi_entry *e = nbi_store_find(store, p->name);
    if (!e)
        return NB_ENOTFOUND;
    return nbi_context(load_entry(be, store, p, e, memory, out), "'%s'", p->name);
}

static enum nb_status load_from_store(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                                      struct nbi_weight *out)
{
    return nbi_weight_load(ctx, be, p, NULL, out);
}

struct nbi_weight_provider nbi_weights_from_store(struct nbi_store *store)
{
    return (struct nbi_weight_provider){load_from_store, store};
}

/* ---- all weights ---- */

static enum nb_status load_all(struct nbi_weights *w, const struct nbi_weight_provider *from,
                               nb_progress_fn progress, void *progress_ctx)
{
    int64_t count = nbi_param_count(w->config);
    for (int64_t i = 0; i < count; i++) {
        struct nbi_param p;
        nbi_param_at(w->config, i, &p);
        enum nb_status rc = from->load(from->ctx, w->be, &p, nbi_param_weight(w, &p));
        if (rc == NB_ENOTFOUND)
            return nbi_fail(NB_EFORMAT, "'%s' is missing from the weights", p.name);
        NBI_TRY(rc);
        if (progress)
            progress(progress_ctx, (uint64_t)i + 1, (uint64_t)count);
    }
    w->own_head = !w->config->tied;
    if (w->own_head)
        return NB_OK;
    /* A quantised model may have a head of its own although its config ties it to the embedding. */
    struct nbi_param head;
    nbi_param_head(w->config, &head);
    enum nb_status rc = from->load(from->ctx, w->be, &head, &w->head);
    w->own_head = rc == NB_OK;
    if (rc == NB_ENOTFOUND)
        w->head = w->embed;
    return rc == NB_ENOTFOUND ? NB_OK : rc;
}

static int64_t matrix_bytes(const struct nbi_weight *w)
{
    return (int64_t)nbi_dtype_bytes(w->dtype, w->rows * w->cols);
}

static void count_bytes(struct nbi_weights *w)
{
    w->bytes_per_token = matrix_bytes(&w->head);
    for (int64_t i = 0; i < nbi_param_count(w->config); i++) {
        struct nbi_param p;
        nbi_param_at(w->config, i, &p);
        if (p.layer >= 0 && p.ndim == 2)
            w->bytes_per_token += matrix_bytes(nbi_param_weight(w, &p));
    }
}

enum nb_status nbi_weights_load(struct nbi_weights *w, struct nbi_backend *be,
                                const struct nbi_config *config,
                                const struct nbi_weight_provider *from, nb_progress_fn progress,
                                void *progress_ctx)
{
    *w = (struct nbi_weights){0};
    if (config->heads / config->kv_heads > NBI_SHARED_MAX || config->head_dim > NBI_HEAD_MAX)
        return nbi_fail(NB_EUNSUPPORTED,
                        "%lld heads on %lld key/value heads of %lld: at most %d on one, of %d",
                        (long long)config->heads, (long long)config->kv_heads,
                        (long long)config->head_dim, NBI_SHARED_MAX, NBI_HEAD_MAX);
    *w = (struct nbi_weights){.be = be, .config = config};
    w->layers = calloc((size_t)config->layers, sizeof *w->layers);
    if (!w->layers)
        return nbi_fail_memory("layers", (size_t)config->layers * sizeof *w->layers);
    enum nb_status rc = load_frequencies(w);
    if (rc == NB_OK)
        rc = load_all(w, from, progress, progress_ctx);
    if (rc == NB_OK)
        count_bytes(w);
    else
        nbi_weights_release(w);
    return rc;
}

void nbi_weights_release(struct nbi_weights *w)
{
    struct nbi_backend *be = w->be;
    if (!be)
        return;
    int64_t count = w->layers ? nbi_param_count(w->config) : 0;
    for (int64_t i = 0; i < count; i++) {
        struct nbi_param p;
        nbi_param_at(w->config, i, &p);
        be->weight_free(be, nbi_param_weight(w, &p));
    }
    if (w->own_head && w->config->tied)
        be->weight_free(be, &w->head);
    be->free(be, w->frequency);
    free(w->layers);
    *w = (struct nbi_weights){0};
}
