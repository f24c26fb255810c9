/* convert.c - nb_convert and nb_quantize: from one model to another, tensor by tensor. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "convert/transfer.h"
#include "convert/verify.h"
#include "formats/names.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

/* A conversion under way. */
struct conversion {
    const struct nb_convert_opts *opts;
    const struct nb_quantize_opts *quant; /* NULL: plain conversion */
    struct nbi_model model;
    struct nbi_target target;
    struct nbi_item *items;
    int64_t count;
    struct nbi_export out;
    struct nbi_transfer transfer;
};

/* ---- which tensors, in which types ---- */

static bool skipped(const struct conversion *c, const char *name)
{
    if (!c->quant->skip)
        return false;
    char stem[512];
    snprintf(stem, sizeof stem, "%s", name);
    if (nbi_ends_with(stem, ".weight"))
        stem[strlen(stem) - strlen(".weight")] = 0;
    for (const char *const *p = c->quant->skip; *p; p++)
        if (nbi_wildcard_match(*p, name) || nbi_wildcard_match(*p, stem) ||
            nbi_wildcard_match(*p, nbi_param_family(name)))
            return true;
    return false;
}

static bool to_be_quantised(const struct conversion *c, const char *name, const struct nbi_entry *e)
{
    return c->quant && e->dtype != NBI_NVFP4 && nbi_param_is_projection(name, e->ndim) &&
           !skipped(c, name);
}

static enum nbi_dtype float_target(enum nb_out_dtype dtype, enum nbi_dtype keep)
{
    return dtype == NB_OUT_F32    ? NBI_F32
           : dtype == NB_OUT_F16  ? NBI_F16
           : dtype == NB_OUT_BF16 ? NBI_BF16
                                  : keep;
}

/* Whether a GGUF notes that this f32 tensor holds values of a narrower type. */
struct widened {
    const char *name;
    bool found;
};

static enum nb_status match_name(void *ctx, uint64_t i, const char *text, size_t len)
{
    struct widened *w = ctx;
    (void)i;
    w->found = w->found || (strlen(w->name) == len && memcmp(w->name, text, len) == 0);
    return NB_OK;
}

static bool noted(const struct nbi_store *store, const char *key, const char *hf_name)
{
    char name[128];
    struct widened w = {.name = name};
    return nbi_name_to_gguf(hf_name, name, sizeof name) && nbi_store_kv(store, key) &&
           nbi_kv_each_string(store, key, match_name, &w) == NB_OK && w.found;
}

static bool narrows_exactly(const float *x, int64_t n, enum nbi_dtype to)
{
    for (int64_t i = 0; i < n; i++) {
        float back = to == NBI_BF16 ? nbi_bf16_to_f32(nbi_f32_to_bf16(x[i]))
                                    : nbi_f16_to_f32(nbi_f32_to_f16(x[i]));
        if (nbi_f32_bits(back) != nbi_f32_bits(x[i]))
            return false;
    }
    return true;
}

/* The type a GGUF's f32 vector had before it was widened, if its values still fit it. */
static enum nb_status original_dtype(const struct nbi_store *store, const struct nbi_entry *e,
                                     enum nbi_dtype *dtype)
{
    *dtype = e->dtype;
    if (store->format != NBI_FORMAT_GGUF || e->dtype != NBI_F32 || e->ndim != 1)
        return NB_OK;
    enum nbi_dtype from = noted(store, NBI_KEY_FROM_BF16, e->name)  ? NBI_BF16
                          : noted(store, NBI_KEY_FROM_F16, e->name) ? NBI_F16
                                                                    : NBI_F32;
    if (from == NBI_F32)
        return NB_OK;
    float *x = malloc((size_t)e->count * sizeof *x + 1);
    if (!x)
        return nbi_fail_memory("tensor", (size_t)e->count * sizeof *x);
    enum nb_status rc = nbi_store_read_f32(store, e, 0, e->count, x);
    if (rc == NB_OK && narrows_exactly(x, e->count, from))
        *dtype = from;
    free(x);
    return rc;
}

static enum nb_status choose_dtype(const struct conversion *c, const struct nbi_entry *e,
                                   struct nbi_item *item)
{
    enum nb_out_dtype wanted = c->opts->dtype;
    struct nbi_out *out = &item->out;
    if (to_be_quantised(c, out->name, e)) {
        out->dtype = NBI_NVFP4;
        out->two_level = c->quant->two_level;
        return NB_OK;
    }
    if (e->dtype == NBI_NVFP4 && (wanted == NB_OUT_KEEP || c->quant)) {
        out->dtype = NBI_NVFP4;
        out->two_level = e->two_level;
        item->tensor_scale = e->tensor_scale;
        item->divisor = e->divisor;
        return NB_OK;
    }
    enum nbi_dtype keep;
    NBI_TRY(original_dtype(c->model.store, e, &keep));
    bool is_float = e->dtype == NBI_NVFP4 || nbi_dtype_is_float(e->dtype);
    if (e->dtype == NBI_F64 && (wanted != NB_OUT_KEEP || c->target.format == NBI_FORMAT_GGUF))
        return nbi_fail(NB_EUNSUPPORTED, "tensor '%s' is f64, which is only copied, not converted",
                        e->name);
    item->narrow = keep;
    out->dtype = is_float ? float_target(wanted, keep) : e->dtype;
    /* llama.cpp multiplies by norms in f32 only; the metadata notes what they were. */
    if (c->target.format == NBI_FORMAT_GGUF && out->ndim == 1 && is_float)
        out->dtype = NBI_F32;
    return NB_OK;
}

static enum nb_status add_item(struct conversion *c, const char *name, const struct nbi_entry *e)
{
    struct nbi_item *item = &c->items[c->count];
    *item = (struct nbi_item){
        .out = {.name = name, .ndim = e->ndim}, .src = e, .narrow = e->dtype, .amax = -1};
    memcpy(item->out.shape, e->shape, sizeof e->shape);
    NBI_TRY(choose_dtype(c, e, item));
    c->count++;
    return NB_OK;
}

static int64_t file_order(const struct nbi_config *config, const struct nbi_item *item)
{
    int64_t i = nbi_param_index(config, item->out.name);
    return i < 0 ? INT64_MAX : i;
}

/* Puts the items into the order of a `.dat`; names it does not know stay at the end as they are.
 * Insertion sort: files are nearly in order, and a model has hundreds of tensors. */
static void sort_items(struct conversion *c, const struct nbi_config *config)
{
    for (int64_t i = 1; i < c->count; i++) {
        struct nbi_item item = c->items[i];
        int64_t order = file_order(config, &item), k = i;
        for (; k > 0 && file_order(config, &c->items[k - 1]) > order; k--)
            c->items[k] = c->items[k - 1];
        c->items[k] = item;
    }
}

static enum nb_status list_items(struct conversion *c)
{
    const struct nbi_store *store = c->model.store;
    c->items = calloc((size_t)store->count + 2, sizeof *c->items);
    if (!c->items)
        return nbi_fail_memory("tensor list", (size_t)store->count * sizeof *c->items);
    for (int64_t i = 0; i < store->count; i++)
        NBI_TRY(add_item(c, store->entries[i].name, &store->entries[i]));
    /* A quantised model has a head of its own, made from the embedding where the two were tied. */
    const struct nbi_entry *embed = nbi_store_find(store, "model.embed_tokens.weight");
    bool tied = !c->model.has_config || c->model.config.tied;
    if (c->quant && embed && tied && !nbi_store_find(store, "lm_head.weight") &&
        nbi_dtype_is_float(embed->dtype) && to_be_quantised(c, "lm_head.weight", embed))
        NBI_TRY(add_item(c, "lm_head.weight", embed));
    struct nbi_config inferred;
    if (store->format == c->target.format && store->format != NBI_FORMAT_SAFETENSORS)
        return NB_OK; /* the same kind of file keeps its order */
    if (c->model.has_config)
        sort_items(c, &c->model.config);
    else if (nbi_config_infer(&inferred, store) == NB_OK)
        sort_items(c, &inferred);
    return NB_OK;
}

/* ---- tensor scales ---- */

/* Projections that a runtime fuses share one tensor scale: q, k, v; gate, up. */
static const char *const fused[][3] = {{"q_proj", "k_proj", "v_proj"},
                                       {"gate_proj", "up_proj", NULL}};

/* The items that are fused with this one, itself included; the return value says how many. */
static int fused_items(struct conversion *c, struct nbi_item *item, struct nbi_item *group[3])
{
    const char *family = nbi_param_family(item->out.name), *at = strstr(item->out.name, family);
    int n = 0;
    for (size_t g = 0; at && g < sizeof fused / sizeof *fused; g++) {
        bool member = false;
        for (int i = 0; i < 3 && fused[g][i]; i++)
            member = member || strcmp(family, fused[g][i]) == 0;
        for (int i = 0; member && i < 3 && fused[g][i]; i++) {
            char name[1100];
            snprintf(name, sizeof name, "%.*s%s%s", (int)(at - item->out.name), item->out.name,
                     fused[g][i], at + strlen(family));
            for (int64_t k = 0; k < c->count; k++)
                if (strcmp(c->items[k].out.name, name) == 0)
                    group[n++] = &c->items[k];
        }
    }
    if (n == 0)
        group[n++] = item;
    return n;
}

static bool is_fresh(const struct nbi_item *item)
{
    return item->out.dtype == NBI_NVFP4 && item->src->dtype != NBI_NVFP4;
}

/* One scale for the group: that of a member which is NVFP4 already if it is large enough, else the
 * one for the largest value among those that are quantised now. */
static enum nb_status group_scale(struct conversion *c, struct nbi_item *item)
{
    struct nbi_item *group[3];
    int n = fused_items(c, item, group);
    float most = 0, given = 0;
    for (int i = 0; i < n; i++) {
        struct nbi_item *g = group[i];
        if (g->out.dtype == NBI_NVFP4 && !is_fresh(g))
            given = g->tensor_scale;
        if (!is_fresh(g))
            continue;
        if (g->amax < 0)
            NBI_TRY(nbi_transfer_amax(&c->transfer, g->src, &g->amax));
        most = fmaxf(most, g->amax);
    }
    bool fits = given > 0 && most / given <= 6 * NBI_NVFP4_MAX_SCALE;
    item->tensor_scale = fits ? given : nbi_nvfp4_tensor_scale(most);
    return NB_OK;
}

/* Runtimes that fuse these projections take one scale for all of them. */
static void warn_unequal_scales(struct conversion *c)
{
    for (int64_t i = 0; i < c->count; i++) {
        struct nbi_item *group[3], *item = &c->items[i];
        int n = fused_items(c, item, group);
        for (int k = 1; k < n && group[0] == item; k++) {
            const struct nbi_item *other = group[k];
            bool same = item->out.dtype == other->out.dtype &&
                        (item->out.dtype != NBI_NVFP4 || item->tensor_scale == other->tensor_scale);
            if (same)
                continue;
            nbi_log(NB_LOG_WARN,
                    "'%s' and '%s' differ in type or tensor scale; programs that fuse them (vLLM) "
                    "will compute wrong values",
                    item->out.name, other->out.name);
            return;
        }
    }
}

/* ---- the report ---- */

static void add_sums(struct nb_quant_family *f, const struct nbi_quant_sums *s)
{
    /* Until finish_family, rel_mse and snr_db hold the sums of squares, zeros a count. */
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

static void book(struct nb_quantize_report *r, const char *name, const struct nbi_quant_sums *sums)
{
    const char *family = nbi_param_family(name);
    int i = 0;
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
    for (int64_t i = 0; i < c->count; i++)
        c->transfer.total += nbi_entry_bytes(c->items[i].src);
    for (int64_t i = 0; i < c->count; i++) {
        struct nbi_item *item = &c->items[i];
        struct nbi_quant_sums sums;
        bool fresh = is_fresh(item);
        if (fresh && item->out.two_level)
            NBI_TRY(group_scale(c, item));
        NBI_TRY(nbi_transfer_item(&c->transfer, item, i, &sums));
        if (fresh && report)
            book(report, item->out.name, &sums);
    }
    if (c->target.format == NBI_FORMAT_SAFETENSORS)
        warn_unequal_scales(c);
    return NB_OK;
}

/* Whether the file `path` lies directly in the directory `dir`. */
static bool lies_in(const char *path, const char *dir)
{
    char *parent = nbi_path_dir(path);
    bool yes = parent && nbi_path_same(parent, dir);
    free(parent);
    return yes;
}

/* The target must not take the place of anything the conversion reads. */
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
        if (nbi_path_same(file, opts->dst) || (c->target.directory && lies_in(file, opts->dst)))
            part = file;
    }
    if (part)
        return nbi_fail(NB_EINVAL, "'%s' is source and target at once; choose another target",
                        part);
    if (!c->target.directory && c->target.format != NBI_FORMAT_GGUF && nbi_path_is_dir(opts->src) &&
        lies_in(opts->dst, opts->src))
        return nbi_fail(NB_EINVAL, "'%s' inside '%s' would give that directory two sets of weights",
                        opts->dst, opts->src);
    return NB_OK;
}

/* Weights that do not fit their config would make a model that lies about itself. */
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

/* A pattern that matches nothing is most likely a typing error. */
static void warn_idle_patterns(const struct conversion *c)
{
    for (const char *const *p = c->quant ? c->quant->skip : NULL; p && *p; p++) {
        const char *const one[] = {*p, NULL};
        const struct nb_quantize_opts alone = {.skip = one};
        const struct conversion probe = {.quant = &alone};
        bool used = skipped(&probe, "lm_head.weight");
        for (int64_t i = 0; i < c->count; i++)
            used = used || skipped(&probe, c->items[i].out.name);
        if (!used)
            nbi_log(NB_LOG_WARN, "--skip '%s' matches no tensor", *p);
    }
}

static enum nb_status run(struct conversion *c, struct nb_quantize_report *report)
{
    const struct nb_convert_opts *opts = c->opts;
    NBI_TRY(nbi_target_of(opts->dst, &c->target));
    NBI_TRY(nbi_model_open(&c->model, opts->src, opts->model_dir));
    NBI_TRY(check_paths(c));
    NBI_TRY(check_model(c));
    NBI_TRY(list_items(c));
    warn_idle_patterns(c);
    NBI_TRY(nbi_transfer_init(&c->transfer, opts, c->model.store));
    NBI_TRY(nbi_export_begin(&c->out, opts, &c->model, c->items, c->count));
    c->transfer.writer = c->out.writer;
    c->transfer.method = c->quant ? c->quant->method : NB_QUANT_SWEEP;
    if (report) {
        report->source_bytes = 0;
        for (int i = 0; i < c->model.store->file_count; i++)
            report->source_bytes += nbi_source_size(c->model.store->files[i]);
        report->output_bytes = nbi_writer_bytes(c->out.writer);
    }
    enum nb_status rc = transfer_all(c, report);
    if (rc != NB_OK) {
        nbi_export_abort(&c->out);
        return rc;
    }
    return nbi_export_commit(&c->out);
}

static void release(struct conversion *c)
{
    nbi_transfer_release(&c->transfer);
    nbi_model_close(&c->model);
    free(c->items);
}

enum nb_status nb_convert(const struct nb_convert_opts *opts)
{
    struct conversion c = {.opts = opts};
    enum nb_status rc = run(&c, NULL);
    release(&c);
    return nbi_context(rc, "cannot convert '%s'", opts->src);
}

enum nb_status nb_quantize(const struct nb_quantize_opts *opts, struct nb_quantize_report *report)
{
    struct conversion c = {.opts = &opts->to, .quant = opts};
    double start = nbi_now();
    memset(report, 0, sizeof *report);
    snprintf(report->total.name, sizeof report->total.name, "all");
    enum nb_status rc = run(&c, report);
    if (rc == NB_OK && report->total.tensors == 0)
        nbi_log(NB_LOG_WARN, "nothing was quantised: every projection is NVFP4 already or skipped");
    for (int i = 0; i < report->families; i++)
        finish_family(&report->family[i]);
    finish_family(&report->total);
    report->seconds = nbi_now() - start;
    release(&c);
    return nbi_context(rc, "cannot quantize '%s'", opts->to.src);
}
