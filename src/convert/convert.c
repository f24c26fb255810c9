/* convert.c - nb_convert and nb_quantize: one model to another, tensor by tensor. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "convert/transfer.h"
#include "convert/verify.h"
#include "tensor/nvfp4.h"

/* A conversion in progress. */
struct conversion {
    const struct nb_convert_opts *opts;
    const struct nb_quantize_opts *quant; /* NULL: plain conversion */
    struct nbi_model model;
    struct nbi_output target;
    struct nbi_manifest manifest;
    struct nbi_model_writer out;
    struct nbi_transfer transfer;
};

/* ---- tensor scales ---- */

/* Sets the shared scale of the group: that of a member that is NVFP4 already if it is large enough,
 * else the scale for the largest value among the members being quantised. */
static enum nb_status group_scale(struct conversion *c, struct nbi_manifest_entry *item)
{
    struct nbi_manifest_entry *group[3];
    int n = nbi_manifest_fused(&c->manifest, item, group);
    float amax = 0, given = 0;
    for (int i = 0; i < n; i++) {
        struct nbi_manifest_entry *g = group[i];
        if (g->out.dtype == NBI_NVFP4 && !nbi_manifest_quantized_here(g))
            given = g->tensor_scale;
        if (!nbi_manifest_quantized_here(g))
            continue;
        if (g->amax < 0)
            NBI_TRY(nbi_transfer_amax(&c->transfer, g->src, &g->amax));
        amax = fmaxf(amax, g->amax);
    }
    bool keep = given > 0 && nbi_nvfp4_fits(amax, given);
    item->tensor_scale = keep ? given : nbi_nvfp4_tensor_scale(amax);
    return NB_OK;
}

/* ---- the report ---- */

static void add_sums(struct nb_quant_family *f, const struct nbi_quant_sums *s)
{
    /* Until finish_family, rel_mse and snr_db hold sums of squares, and zeros a count. */
    f->rel_mse += s->error;
    f->snr_db += s->signal;
    f->zeros += s->zeros;
    f->values += s->values;
    f->tensors++;
}

static void finish_family(struct nb_quant_family *f)
{
    double error = f->rel_mse, signal = f->snr_db;
    f->rel_mse = signal > 0 ? error / signal : 0;
    f->snr_db = error > 0 ? 10 * log10(signal / error) : INFINITY;
    f->zeros = f->values ? f->zeros / (double)f->values : 0;
}

static void add_to_report(struct nb_quantize_report *r, const char *name,
                          const struct nbi_quant_sums *sums)
{
    char family[NBI_PARAM_FAMILY_MAX];
    int i = 0;
    nbi_param_family(name, family);
    while (i < r->families && strcmp(r->family[i].name, family) != 0)
        i++;
    if (i == r->families)
        snprintf(r->family[r->families++].name, sizeof r->family[i].name, "%s", family);
    add_sums(&r->family[i], sums);
    add_sums(&r->total, sums);
}

/* ---- the loop ---- */

static enum nb_status transfer_all(struct conversion *c, struct nb_quantize_report *report)
{
    for (int64_t i = 0; i < c->manifest.count; i++)
        c->transfer.total += nbi_entry_bytes(c->manifest.entries[i].src);
    for (int64_t i = 0; i < c->manifest.count; i++) {
        struct nbi_manifest_entry *item = &c->manifest.entries[i];
        struct nbi_quant_sums sums;
        bool quantized_here = nbi_manifest_quantized_here(item);
        if (quantized_here && item->out.two_level)
            NBI_TRY(group_scale(c, item));
        NBI_TRY(nbi_transfer_entry(&c->transfer, item, i, &sums));
        if (quantized_here && report)
            add_to_report(report, item->out.name, &sums);
    }
    if (c->target.format == NBI_FORMAT_SAFETENSORS)
        nbi_manifest_warn_unequal(&c->manifest);
    return NB_OK;
}

/* The target must not replace anything that the conversion reads. */
static enum nb_status check_paths(const struct conversion *c)
{
    const struct nb_convert_opts *opts = c->opts;
    const char *part = NULL;
    if (nbi_path_same(opts->src, opts->dst))
        part = opts->src;
    if (c->target.directory && c->model.dir && nbi_path_same(c->model.dir, opts->dst))
        part = c->model.dir;
    for (int i = 0; i < c->model.store->file_count; i++) {
        const char *file = nbi_source_path(c->model.store->files[i]);
        if (nbi_path_same(file, opts->dst) || (c->target.directory && nbi_path_in(file, opts->dst)))
            part = file;
    }
    if (part)
        return nbi_fail(NB_EINVAL, "'%s' is both source and target; choose another target", part);
    if (!c->target.directory && c->target.format != NBI_FORMAT_GGUF && nbi_path_is_dir(opts->src) &&
        nbi_path_in(opts->dst, opts->src))
        return nbi_fail(NB_EINVAL, "'%s' inside '%s' would give that directory two sets of weights",
                        opts->dst, opts->src);
    return NB_OK;
}

/* Weights that do not fit their config are an error if the config goes into the output or decides
 * what is quantised, else a warning. */
static enum nb_status check_model(const struct conversion *c)
{
    const struct nbi_model *m = &c->model;
    if (m->store->count == 0)
        return nbi_fail(NB_EFORMAT, "it holds no tensors");
    if (!m->has_config)
        return NB_OK;
    enum nb_status rc = nbi_check_names(m->store, &m->config);
    bool needed = c->quant || c->target.directory || c->target.format == NBI_FORMAT_GGUF;
    if (rc != NB_OK && !needed) {
        nbi_log(NB_LOG_WARN, "the weights do not fit their config: %s", nb_last_error());
        rc = NB_OK;
    }
    return nbi_context(rc, "the weights do not fit their config");
}

/* Everything before the commit. */
static enum nb_status run(struct conversion *c, struct nb_quantize_report *report)
{
    const struct nb_convert_opts *opts = c->opts;
    NBI_TRY(nbi_output_of(opts->dst, &c->target));
    NBI_TRY(nbi_model_open(&c->model, opts->src, opts->model_dir));
    NBI_TRY(check_paths(c));
    NBI_TRY(check_model(c));
    NBI_TRY(nbi_manifest_init(&c->manifest, &c->model, c->target.format, opts, c->quant));
    NBI_TRY(nbi_transfer_init(&c->transfer, opts, c->model.store));
    NBI_TRY(
        nbi_model_writer_begin(&c->out, opts, &c->model, c->manifest.entries, c->manifest.count));
    c->transfer.writer = c->out.writer;
    c->transfer.method = c->quant ? c->quant->method : NB_QUANT_SWEEP;
    if (report) {
        report->source_bytes = 0;
        for (int i = 0; i < c->model.store->file_count; i++)
            report->source_bytes += nbi_source_size(c->model.store->files[i]);
        report->output_bytes = nbi_writer_bytes(c->out.writer);
    }
    enum nb_status rc = transfer_all(c, report);
    if (rc != NB_OK)
        nbi_model_writer_abort(&c->out);
    return rc;
}

static void release(struct conversion *c)
{
    nbi_transfer_release(&c->transfer);
    nbi_model_close(&c->model);
    nbi_manifest_release(&c->manifest);
}

enum nb_status nb_convert(const struct nb_convert_opts *opts)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct conversion c = {.opts = opts};
    enum nb_status rc = nbi_context(run(&c, NULL), "cannot convert '%s'", opts->src);
    if (rc == NB_OK)
        rc = nbi_model_writer_commit(&c.out);
    release(&c);
    return rc;
}

enum nb_status nb_quantize(const struct nb_quantize_opts *opts, struct nb_quantize_report *report)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->to.cancel);
    struct conversion c = {.opts = &opts->to, .quant = opts};
    struct nb_quantize_report sums = {.total.name = "all"};
    double start = nbi_now();
    enum nb_status rc = nbi_context(run(&c, &sums), "cannot quantize '%s'", opts->to.src);
    if (rc == NB_OK)
        rc = nbi_model_writer_commit(&c.out);
    release(&c);
    if (rc != NB_OK)
        return rc;
    if (sums.total.tensors == 0)
        nbi_log(NB_LOG_WARN, "nothing was quantised: every projection is NVFP4 already or skipped");
    for (int i = 0; i < sums.families; i++)
        finish_family(&sums.family[i]);
    finish_family(&sums.total);
    sums.seconds = nbi_now() - start;
    *report = sums;
    return NB_OK;
}
