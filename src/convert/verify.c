/* verify.c - checks a model file: names and shapes first, then every value. */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "base/str.h"
#include "base/sys.h"
#include "convert/transfer.h"
#include "convert/verify.h"
#include "tensor/nvfp4.h"

#define CHUNK ((int64_t)1 << 18)

/* ---- names and shapes ---- */

static enum nb_status check_entry(const struct nbi_config *config, const struct nbi_entry *e)
{
    struct nbi_param p;
    if (!nbi_param_find(config, e->name, &p))
        return nbi_fail(NB_EFORMAT, "tensor '%s' is not part of this model", e->name);
    bool fits = nbi_param_fits(&p, e);
    if (p.ndim == 1 && !fits)
        return nbi_fail(NB_EFORMAT, "tensor '%s' does not have the shape [%lld] of this model",
                        e->name, (long long)p.shape[0]);
    if (!fits)
        return nbi_fail(NB_EFORMAT,
                        "tensor '%s' does not have the shape [%lld, %lld] of this model", e->name,
                        (long long)p.shape[0], (long long)p.shape[1]);
    if (e->dtype != NBI_NVFP4 && !nbi_dtype_is_float(e->dtype))
        return nbi_fail(NB_EFORMAT, "tensor '%s' has type %s, not a type of weights", e->name,
                        nbi_dtypes[e->dtype].name);
    return NB_OK;
}

enum nb_status nbi_check_names(const struct nbi_store *store, const struct nbi_config *config)
{
    for (int64_t i = 0; i < store->count; i++)
        NBI_TRY(check_entry(config, &store->entries[i]));
    int64_t n = nbi_param_count(config);
    for (int64_t i = 0; i < n; i++) {
        struct nbi_param p;
        nbi_param_at(config, i, &p);
        if (!nbi_store_find(store, p.name))
            return nbi_fail(NB_EFORMAT, "tensor '%s' is missing", p.name);
    }
    return NB_OK;
}

/* A `.dat` has no checksum, and one damaged byte can turn the type code of bf16 into that of f16,
 * which has the same size. No model mixes the two. */
static enum nb_status check_half_types(const struct nbi_store *store)
{
    const struct nbi_entry *f16 = NULL, *bf16 = NULL;
    for (int64_t i = 0; i < store->count; i++) {
        f16 = store->entries[i].dtype == NBI_F16 ? &store->entries[i] : f16;
        bf16 = store->entries[i].dtype == NBI_BF16 ? &store->entries[i] : bf16;
    }
    if (store->format != NBI_FORMAT_DAT || !f16 || !bf16)
        return NB_OK;
    return nbi_fail(NB_EFORMAT, "'%s' is f16 and '%s' bf16: a type code is damaged", f16->name,
                    bf16->name);
}

/* Readers of safetensors look at metadata "format". If there is metadata, it must contain one of
 * the known values. */
static enum nb_status check_metadata(const struct nbi_store *store)
{
    static const char *const known[] = {"pt", "np", "tf", "flax", "mlx"};
    if (store->format != NBI_FORMAT_SAFETENSORS || store->meta_count == 0)
        return NB_OK;
    int good = 0;
    for (int64_t i = 0; i < store->meta_count; i++) {
        if (strcmp(store->meta[i].key, "format") != 0)
            continue;
        bool found = false;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            found = found || strcmp(store->meta[i].value, known[k]) == 0;
        if (!found)
            return nbi_fail(NB_EFORMAT, "metadata 'format' is '%s', which is unknown",
                            store->meta[i].value);
        good++;
    }
    return good ? NB_OK : nbi_fail(NB_EFORMAT, "the metadata has no 'format'");
}

/* ---- values ---- */

struct scan {
    const struct nbi_store *store;
    const struct nbi_entry *e;
    uint8_t *raw; /* one chunk per thread */
    float *f32;
};

static enum nb_status check_scales(const struct nbi_entry *e, const uint8_t *codes, int64_t first,
                                   int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (codes[i] < 0x01 || codes[i] > 0x7E)
            return nbi_fail(NB_EVALUE,
                            "block scale %lld of tensor '%s' is %s; it must be finite and positive",
                            (long long)(first + i), e->name,
                            codes[i] == 0               ? "zero"
                            : (codes[i] & 0x7F) == 0x7F ? "NaN"
                                                        : "negative");
    return NB_OK;
}

static enum nb_status scan_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct scan *s = ctx;
    const struct nbi_entry *e = s->e;
    uint8_t *raw = s->raw + thread * CHUNK;
    float *x = s->f32 + thread * CHUNK;
    bool e4m3 = s->store->layout == NBI_LAYOUT_GGUF || e->scale_dtype == NBI_E4M3;
    if (e->dtype == NBI_NVFP4 && e4m3) {
        uint8_t *scales = raw + count / 2;
        NBI_TRY(nbi_store_read_nvfp4(s->store, e, first, count, raw, scales));
        return check_scales(e, scales, first / NBI_NVFP4_BLOCK, count / NBI_NVFP4_BLOCK);
    }
    NBI_TRY(nbi_store_read_f32(s->store, e, first, count, x));
    float amax;
    return nbi_check_finite(e->name, x, first, count, &amax);
}

/* Checks scales that old files store as floats. */
static enum nb_status check_float_scales(const struct nbi_store *store, const struct nbi_entry *e)
{
    enum { STEP = 1024 };
    float scales[STEP];
    int64_t count = e->count / NBI_NVFP4_BLOCK;
    for (int64_t i = 0; i < count; i += STEP) {
        int64_t n = count - i < STEP ? count - i : STEP;
        NBI_TRY(nbi_store_read_float_scales(store, e, i, n, scales));
        for (int64_t k = 0; k < n; k++)
            if (!isfinite(scales[k]) || scales[k] <= 0)
                return nbi_fail(NB_EVALUE,
                                "block scale %lld of tensor '%s' is %g; it must be finite and "
                                "positive",
                                (long long)(i + k), e->name, (double)scales[k]);
    }
    return NB_OK;
}

static enum nb_status scan_values(const struct nbi_store *store, int threads,
                                  nb_progress_fn progress, void *progress_ctx)
{
    threads = threads > 0 ? threads : nbi_cpu_count();
    struct scan s = {.store = store};
    uint64_t done = 0, total = 0;
    s.raw = malloc((size_t)threads * CHUNK);
    s.f32 = malloc((size_t)threads * CHUNK * sizeof *s.f32);
    enum nb_status rc =
        s.raw && s.f32 ? NB_OK : nbi_fail_memory("buffers", (size_t)threads * CHUNK * 5);
    for (int64_t i = 0; i < store->count; i++)
        total += nbi_entry_bytes(&store->entries[i]);
    for (int64_t i = 0; i < store->count && rc == NB_OK; i++) {
        s.e = &store->entries[i];
        rc = nbi_for_chunks(s.e->count, CHUNK, threads, scan_chunk, &s);
        if (rc == NB_OK && s.e->dtype == NBI_NVFP4 && store->layout == NBI_LAYOUT_DAT &&
            s.e->scale_dtype != NBI_E4M3)
            rc = check_float_scales(store, s.e);
        done += nbi_entry_bytes(s.e);
        if (progress)
            progress(progress_ctx, done, total);
    }
    free(s.raw);
    free(s.f32);
    return rc;
}

enum nb_status nbi_verify(const struct nbi_model *m, int threads, nb_progress_fn progress,
                          void *progress_ctx)
{
    struct nbi_config config = m->config;
    if (!m->has_config && (m->config_json || m->store->format == NBI_FORMAT_GGUF))
        return nbi_model_need_config(m); /* there is a config, and it is unusable */
    if (!m->has_config)
        NBI_TRY(nbi_config_infer(&config, m->store));
    NBI_TRY(check_metadata(m->store));
    NBI_TRY(nbi_check_names(m->store, &config));
    NBI_TRY(check_half_types(m->store));
    return scan_values(m->store, threads, progress, progress_ctx);
}
