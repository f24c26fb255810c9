/* synth.c - random models of real shapes, for benchmarks, demos and tests.
 *
 * Value i of parameter p is a pure function of (seed, p, i), independent of threads and chunks. */
#include <math.h>
#include <string.h>

#include "base/dirs.h"
#include "base/parallel.h"
#include "base/rng.h"
#include "base/sys.h"
#include "convert/model_writer.h"
#include "tensor/codec.h"

#define CHUNK ((int64_t)1 << 18)

struct synth {
    const struct nb_synth_opts *opts;
    struct nbi_model model;
    struct nbi_model_writer out;
    int threads;
    float sigma;
    float *f32;
    uint16_t *half;
    int64_t index; /* the parameter being written */
    const struct nbi_tensor_spec *tensor;
};

static enum nb_status fill_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    struct synth *s = ctx;
    float *x = s->f32 + thread * CHUNK;
    bool norm = s->tensor->ndim == 1; /* norm weights are around 1 */
    for (int64_t i = 0; i < count; i += 4) {
        float v[4];
        nbi_philox_normal4(v, s->opts->seed, (uint64_t)(first + i) / 4, (uint64_t)s->index);
        for (int k = 0; k < 4 && i + k < count; k++)
            x[i + k] = norm ? 1.0f + s->sigma * v[k] : s->sigma * v[k];
    }
    if (s->tensor->dtype == NBI_F32)
        return nbi_writer_put(s->out.writer, s->index, first, count, x);
    uint16_t *h = s->half + thread * CHUNK;
    if (s->tensor->dtype == NBI_F16)
        nbi_codec_table()->f32_to_f16(h, x, count);
    else
        nbi_codec_table()->f32_to_bf16(h, x, count);
    return nbi_writer_put(s->out.writer, s->index, first, count, h);
}

static enum nb_status fill_all(struct synth *s, const struct nbi_manifest_entry *items, int64_t n)
{
    uint64_t done = 0, total = 0;
    int64_t count;
    for (int64_t i = 0; i < n; i++) {
        NBI_TRY(nbi_count(items[i].out.shape, items[i].out.ndim, &count));
        total += nbi_dtype_bytes(items[i].out.dtype, count);
    }
    for (int64_t i = 0; i < n; i++) {
        s->index = i;
        s->tensor = &items[i].out;
        NBI_TRY(nbi_count(s->tensor->shape, s->tensor->ndim, &count));
        NBI_TRY(nbi_for_chunks(count, CHUNK, s->threads, fill_chunk, s));
        done += nbi_dtype_bytes(s->tensor->dtype, count);
        if (s->opts->progress)
            s->opts->progress(s->opts->progress_ctx, done, total);
    }
    return NB_OK;
}

static enum nb_status load_config(struct synth *s)
{
    struct nbi_model *m = &s->model;
    if (s->opts->preset) {
        NBI_TRY(nbi_config_preset(&m->config, s->opts->preset));
    } else {
        NBI_TRY(nbi_json_read_file(&m->config_json, s->opts->config, NBI_CONFIG_FILE_MAX));
        NBI_TRY(nbi_context(nbi_config_parse(&m->config, m->config_json), "reading '%s'",
                            s->opts->config));
        m->dir = nbi_path_dir(s->opts->config); /* its tokenizer is copied too */
        if (!m->dir)
            return NB_ENOMEM;
    }
    m->has_config = true;
    return NB_OK;
}

static enum nb_status run(struct synth *s)
{
    struct nbi_output target;
    NBI_TRY(nbi_output_of(s->opts->dst, &target));
    if (!target.directory)
        return nbi_fail(NB_EINVAL, "'%s' is not the name of a directory", s->opts->dst);
    if (nbi_path_is_dir(s->opts->dst) && !nbi_dir_is_empty(s->opts->dst))
        return nbi_fail(NB_EINVAL,
                        "'%s' is not empty; a random model only goes into a new directory",
                        s->opts->dst);
    NBI_TRY(load_config(s));
    const struct nbi_config *c = &s->model.config;
    s->sigma = s->opts->sigma > 0 ? s->opts->sigma : (float)c->initializer_range;
    int64_t n = nbi_param_count(c);
    struct nbi_manifest_entry *items = calloc((size_t)n, sizeof *items);
    struct nbi_param *params = calloc((size_t)n, sizeof *params);
    s->f32 = malloc((size_t)s->threads * CHUNK * sizeof *s->f32);
    s->half = malloc((size_t)s->threads * CHUNK * sizeof *s->half);
    enum nb_status rc = items && params && s->f32 && s->half
                            ? NB_OK
                            : nbi_fail_memory("parameter list", (size_t)n * sizeof *items);
    for (int64_t i = 0; i < n && rc == NB_OK; i++) {
        nbi_param_at(c, i, &params[i]);
        items[i].out = (struct nbi_tensor_spec){.name = params[i].name,
                                                .dtype = s->opts->dtype == NB_OUT_F32   ? NBI_F32
                                                         : s->opts->dtype == NB_OUT_F16 ? NBI_F16
                                                                                        : NBI_BF16,
                                                .ndim = params[i].ndim,
                                                .shape = {params[i].shape[0], params[i].shape[1]}};
    }
    struct nb_convert_opts to = {.src = "", .dst = s->opts->dst};
    if (rc == NB_OK)
        rc = nbi_model_writer_begin(&s->out, &to, &s->model, items, n);
    if (rc == NB_OK) {
        rc = fill_all(s, items, n);
        if (rc != NB_OK)
            nbi_model_writer_abort(&s->out);
    }
    free(items);
    free(params);
    return rc;
}

enum nb_status nb_synth(const struct nb_synth_opts *opts)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct synth s = {.opts = opts, .threads = opts->threads > 0 ? opts->threads : nbi_cpu_count()};
    enum nb_status rc = nbi_context(run(&s), "cannot make '%s'", opts->dst);
    if (rc == NB_OK)
        rc = nbi_model_writer_commit(&s.out);
    free(s.f32);
    free(s.half);
    nbi_model_close(&s.model);
    return rc;
}
