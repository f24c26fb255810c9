/* parameters.c - masters, moments, gradients and weights: their types, places and values.
 *
 * All arrays of a kind are one block. nbi_train_params_plan and nbi_train_params_init place them in
 * it by the same function, so that a plan is exact. */
#include "train/parameters.h"

#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "base/rng.h"
#include "base/str.h"
#include "base/sys.h"
#include "convert/manifest.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define CHUNK ((int64_t)1 << 18)

/* ---- types and sizes ---- */

static bool is_trained(const struct nbi_config *c, const struct nbi_train_params_opts *o,
                       const struct nbi_param *p)
{
    if (o->last_layers <= 0 || o->last_layers >= c->layers)
        return true;
    if (p->layer >= 0)
        return p->layer >= c->layers - o->last_layers;
    return !(p->def->flags & (NBI_GATHER | NBI_MAY_TIE)); /* the final norm */
}

static bool is_nvfp4(const struct nbi_train_params_opts *o, const struct nbi_param *p)
{
    return o->precision == NB_PRECISION_NVFP4 && p->def->flags & NBI_QUANT && p->shape[1] % 16 == 0;
}

/* The type that floats are used and written in: the source's, unless they are trained and the
 * precision asks for another. */
static enum nbi_dtype float_type_of(const struct nbi_store *store,
                                    const struct nbi_train_params_opts *o,
                                    const struct nbi_param *p, bool trained)
{
    const struct nbi_entry *e = store ? nbi_store_find(store, p->name) : NULL;
    if (!trained && e && nbi_dtype_is_float(e->dtype))
        return e->dtype;
    if (o->precision == NB_PRECISION_F32)
        return NBI_F32;
    bool kept = e && (e->dtype == NBI_BF16 || e->dtype == NBI_F16);
    if (o->precision == NB_PRECISION_NVFP4 && e && e->dtype == NBI_F32)
        return NBI_F32;
    return kept ? e->dtype : NBI_BF16;
}

/* Whether any NVFP4 tensor of the source has a tensor scale. */
static bool has_tensor_scales(const struct nbi_store *store)
{
    for (int64_t i = 0; store && i < store->count; i++)
        if (store->entries[i].dtype == NBI_NVFP4 && store->entries[i].two_level)
            return true;
    return false;
}

static void describe_output(const struct nbi_store *store, const struct nbi_train_params_opts *o,
                            struct nbi_train_param *t)
{
    const struct nbi_param *p = &t->param;
    const struct nbi_entry *e = store ? nbi_store_find(store, p->name) : NULL;
    bool stored = e && e->dtype == NBI_NVFP4;
    t->quantized = t->trained ? is_nvfp4(o, p) : stored;
    t->has_tensor_scale =
        t->quantized && (t->trained ? has_tensor_scales(store) : stored && e->two_level);
    t->divisor = t->has_tensor_scale && stored ? e->divisor : 0;
    t->float_type = nbi_float_dtype_for(o->target, p->ndim, float_type_of(store, o, p, t->trained));
}

static int64_t slice_rows_of(const struct nbi_train_params_opts *o)
{
    return o->update_in_backward ? o->slice_rows : 0;
}

/* A parameter's types and sizes, before anything is allocated. */
static struct nbi_train_param describe(const struct nbi_config *c, const struct nbi_store *store,
                                       const struct nbi_train_params_opts *o,
                                       const struct nbi_param *p)
{
    struct nbi_train_param t = {.param = *p,
                                .index = p->index,
                                .count = nbi_param_values(p),
                                .layer = p->layer,
                                .trained = is_trained(c, o, p),
                                .dtype = p->ndim == 2 ? o->master : NBI_F32,
                                .grad_bf16 = o->bf16_grads && p->ndim == 2 && p->layer >= 0};
    describe_output(store, o, &t);
    if (t.trained && p->ndim == 2 && p->layer < 0)
        t.slice_rows = slice_rows_of(o);
    /* Small tensors save little memory, and errors in norms affect every token. */
    enum nb_moment_type kind = p->ndim == 2 && t.count > 4096 ? o->moment_type : NB_MOMENT_F32;
    t.m.kind = t.v.kind = kind;
    return t;
}

/* Whether the master has the type of the weight, so that the forward pass can use it directly. */
static bool uses_master(const struct nbi_train_param *t)
{
    return !t->quantized && t->param.ndim == 2 && t->float_type == t->dtype;
}

/* Whether the head is a parameter with a master and a gradient. */
static bool has_own_head(const struct nbi_config *c, const struct nbi_store *store)
{
    return !c->tied || (store && nbi_store_find(store, nbi_head_name()));
}

static bool has_tied_head(const struct nbi_config *c, const struct nbi_store *store,
                          const struct nbi_train_params_opts *o)
{
    return c->tied && o->precision == NB_PRECISION_NVFP4 && c->hidden_size % 16 == 0 &&
           (o->last_layers <= 0 || o->last_layers >= c->layers) && !has_own_head(c, store);
}

bool nbi_train_params_at(const struct nbi_config *c, const struct nbi_store *store,
                         const struct nbi_train_params_opts *o, int64_t i,
                         struct nbi_train_param *out)
{
    struct nbi_param p;
    bool head = c->tied &&
                (has_tied_head(c, store, o) || (store && nbi_store_find(store, nbi_head_name())));
    if (i >= nbi_param_count(c) + head)
        return false;
    nbi_param_at(c, i, &p);
    *out = describe(c, store, o, &p);
    return true;
}

/* ---- masters ---- */

static enum nb_status read_values(const struct nbi_train_params *t, const struct nbi_train_param *x,
                                  int64_t first, int64_t count, float *out)
{
    if (t->store) {
        const struct nbi_entry *e = nbi_store_find(t->store, x->param.name);
        return nbi_store_read_f32(t->store, e, first, count, out);
    }
    for (int64_t i = 0; i < count; i += 4) {
        float v[4];
        nbi_philox_normal4(v, t->opts.seed, (uint64_t)(first + i) / 4, (uint64_t)x->index);
        for (int k = 0; k < 4 && i + k < count; k++)
            out[i + k] = x->param.ndim == 1 ? 1 : (float)t->config->initializer_range * v[k];
    }
    return NB_OK;
}

static enum nb_status check_source(const struct nbi_train_params *t,
                                   const struct nbi_train_param *x)
{
    const struct nbi_entry *e = t->store ? nbi_store_find(t->store, x->param.name) : NULL;
    if (!t->store)
        return NB_OK;
    if (!e)
        return nbi_fail(NB_EFORMAT, "'%s' is missing from the weights", x->param.name);
    if (!nbi_param_fits(&x->param, e))
        return nbi_fail(NB_EFORMAT, "'%s': its shape is not the one the config asks for",
                        x->param.name);
    return NB_OK;
}

/* Values [first, first + count) of a master on their way to the device. */
struct batch {
    const struct nbi_train_params *t;
    const struct nbi_train_param *x;
    int64_t first;
};

/* For nbi_for_chunks: values of a batch, in the type of the master. */
static enum nb_status fill_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct batch *b = ctx;
    float *f = b->t->staging.f32 + first;
    (void)thread;
    NBI_TRY(read_values(b->t, b->x, b->first + first, count, f));
    if (b->x->dtype == NBI_BF16)
        nbi_codec_table()->f32_to_bf16(b->t->staging.bf16 + first, f, count);
    return NB_OK;
}

static enum nb_status alloc_staging(struct nbi_train_params *t)
{
    t->staging.threads = t->opts.threads > 0 ? t->opts.threads : nbi_cpu_count();
    t->staging.values = t->staging.threads * CHUNK;
    t->staging.f32 = malloc((size_t)t->staging.values * sizeof(float));
    t->staging.bf16 = malloc((size_t)t->staging.values * sizeof(uint16_t));
    return t->staging.f32 && t->staging.bf16
               ? NB_OK
               : nbi_fail_memory("weights", (size_t)t->staging.values * 6);
}

static void free_staging(struct nbi_train_params *t)
{
    free(t->staging.f32);
    free(t->staging.bf16);
    t->staging.f32 = NULL;
    t->staging.bf16 = NULL;
}

static enum nb_status fill_master(struct nbi_train_params *t, struct nbi_train_param *x)
{
    const int64_t size = nbi_dtypes[x->dtype].bytes;
    const void *from = x->dtype == NBI_BF16 ? (const void *)t->staging.bf16 : t->staging.f32;
    struct batch b = {t, x, 0};
    if (!t->store && t->opts.draw && x->param.ndim == 2)
        return t->be->draw(t->stream,
                           &(struct nbi_op_draw){.out = x->master,
                                                 .dtype = x->dtype,
                                                 .n = x->count,
                                                 .deviation = (float)t->config->initializer_range,
                                                 .seed = t->opts.seed,
                                                 .stream = (uint64_t)x->index});
    NBI_TRY(check_source(t, x));
    for (; b.first < x->count; b.first += t->staging.values) {
        int64_t left = x->count - b.first, n = left < t->staging.values ? left : t->staging.values;
        NBI_TRY(nbi_check_interrupt());
        NBI_TRY(nbi_for_chunks(n, CHUNK, t->staging.threads, fill_chunk, &b));
        NBI_TRY(t->be->upload(t->stream, nbi_ptr_add(x->master, b.first * size), from, n * size));
    }
    return NB_OK;
}

/* ---- blocks ---- */

/* The next bytes of a block. Without memory, addresses count from 0. */
static struct nbi_ptr take(struct nbi_train_params *t, enum nbi_param_block kind, int64_t bytes)
{
    struct nbi_ptr p = nbi_ptr_add(t->blocks[kind].at, t->blocks[kind].bytes);
    t->blocks[kind].bytes += (bytes + 63) / 64 * 64;
    return bytes > 0 ? p : (struct nbi_ptr){0};
}

static void place_moment(struct nbi_train_params *t, struct nbi_moment *m, int64_t count)
{
    int64_t scales, values = nbi_moment_bytes(m->kind, count, &scales);
    m->values = take(t, NBI_BLOCK_MOMENTS, values);
    m->scales = take(t, NBI_BLOCK_MOMENTS, scales);
}

/* The type in which the backend keeps the weight. */
static enum nbi_dtype weight_dtype(const struct nbi_store *store, const struct nbi_train_param *x)
{
    const struct nbi_entry *e = store ? nbi_store_find(store, x->param.name) : NULL;
    if (!x->trained && e)
        return e->dtype;
    return x->quantized ? NBI_NVFP4 : x->param.ndim == 1 ? NBI_F32 : x->float_type;
}

static void place_weight(struct nbi_train_params *t, struct nbi_train_param *x)
{
    const int64_t *shape = x->param.shape;
    enum nb_weight_store kept = t->opts.weight_store;
    enum nbi_dtype dtype = weight_dtype(t->store, x);
    bool nvfp4 = x->trained && dtype == NBI_NVFP4;
    int64_t bytes = nvfp4 && kept == NB_WEIGHT_STORE_SCALES
                        ? x->count / 16
                        : t->be->weight_bytes(t->be, dtype, shape[0], shape[1]);
    x->on_host = !x->trained && nbi_weight_is_lookup(t->store, &x->param) &&
                 nbi_backend_has(t->be, NBI_CAP_OWN_MEMORY);
    if (x->on_host)
        t->host_bytes += bytes;
    else
        x->memory.data = take(t, NBI_BLOCK_WEIGHTS, bytes);
    if (nvfp4 && kept == NB_WEIGHT_STORE_BF16)
        x->memory.bf16 = take(t, NBI_BLOCK_COPIES, (int64_t)nbi_dtype_bytes(NBI_BF16, x->count));
}

/* With updates inside the backward pass, all layers use the gradients of the first trained one.
 * Slices of embedding and head come after all layers, so they use the same memory, from its
 * beginning on; the final norm's gradient, which is kept meanwhile, lies after both. */
static void place_grad(struct nbi_train_params *t, struct nbi_train_param *x)
{
    int64_t rows = x->param.shape[0], *used = &t->blocks[NBI_BLOCK_GRADIENTS].bytes;
    if (t->opts.update_in_backward && x->layer > t->first_layer)
        return;
    if (x->slice_rows > 0) {
        rows = x->slice_rows < rows ? x->slice_rows : rows;
        int64_t bytes = (rows * x->param.shape[1] * (int64_t)sizeof(float) + 63) / 64 * 64;
        bool head = x->param.def->flags & NBI_MAY_TIE;
        x->grad = nbi_ptr_add(t->blocks[NBI_BLOCK_GRADIENTS].at, head ? bytes : 0);
        t->slice_bytes = bytes * (has_own_head(t->config, t->store) ? 2 : 1);
        return;
    }
    if (x->layer < 0 && *used < t->slice_bytes)
        *used = t->slice_bytes;
    x->grad = take(t, NBI_BLOCK_GRADIENTS,
                   (int64_t)nbi_dtype_bytes(x->grad_bf16 ? NBI_BF16 : NBI_F32, x->count));
}

/* Gives a parameter its parts of the blocks. Matrices of a fuse group follow one another, so that
 * a product can take them as one. */
static void place(struct nbi_train_params *t, struct nbi_train_param *x, bool tied)
{
    if (!x->trained || !uses_master(x))
        place_weight(t, x);
    if (!x->trained || tied)
        return;
    x->master = take(t, NBI_BLOCK_MASTERS, (int64_t)nbi_dtype_bytes(x->dtype, x->count));
    place_moment(t, &x->m, x->count);
    place_moment(t, &x->v, x->count);
    place_grad(t, x);
}

/* Sets t->blocks to the bytes that all parameters take. */
static void measure_blocks(struct nbi_train_params *t)
{
    struct nbi_train_param x;
    bool tied = has_tied_head(t->config, t->store, &t->opts);
    t->host_bytes = 0;
    memset(t->blocks, 0, sizeof t->blocks);
    for (int64_t i = 0; nbi_train_params_at(t->config, t->store, &t->opts, i, &x); i++)
        place(t, &x, tied && i == nbi_param_count(t->config));
}

/* All memory, touched now and not in the first step. */
static enum nb_status alloc_blocks(struct nbi_train_params *t)
{
    static const char *const names[] = {NBI_PARAM_BLOCK_LIST(NB_ENUM_NAME)};
    measure_blocks(t);
    for (int i = 0; i < NBI_PARAM_BLOCKS; i++) {
        int64_t bytes = t->blocks[i].bytes;
        if (bytes == 0)
            continue;
        NBI_TRY(t->be->alloc(t->be, names[i], bytes, &t->blocks[i].at));
        if (i == NBI_BLOCK_MOMENTS || i == NBI_BLOCK_GRADIENTS)
            NBI_TRY(t->be->clear(t->stream, t->blocks[i].at, bytes));
        t->blocks[i].bytes = 0; /* place() counts again */
    }
    return NB_OK;
}

/* ---- one parameter ---- */

static enum nb_status make_weight(struct nbi_train_params *t, struct nbi_train_param *x,
                                  struct nbi_weight *out)
{
    const struct nbi_param *p = &x->param;
    x->weight = out;
    if (uses_master(x)) {
        *out = (struct nbi_weight){.dtype = x->float_type,
                                   .rows = p->shape[0],
                                   .cols = p->shape[1],
                                   .data = x->master,
                                   .tensor_scale = 1,
                                   .borrowed = true};
        return NB_OK;
    }
    NBI_TRY(t->be->weight_alloc(t->be, weight_dtype(t->store, x), p->shape[0], p->shape[1],
                                t->opts.weight_store, &x->memory, out));
    out->master = x->master;
    out->master_dtype = x->dtype;
    const struct nbi_entry *e = t->store ? nbi_store_find(t->store, p->name) : NULL;
    if (x->has_tensor_scale) /* 0: set_scale chooses one */
        out->tensor_scale = e && e->dtype == NBI_NVFP4 ? e->tensor_scale : 0;
    return NB_OK;
}

static enum nb_status make_param(struct nbi_train_params *t, struct nbi_train_param *x,
                                 struct nbi_weight *out)
{
    if (t->opts.update_in_backward && x->layer > t->first_layer)
        x->grad = x[-(x->layer - t->first_layer) * nbi_params_per_layer(t->config)].grad;
    NBI_TRY(fill_master(t, x));
    return make_weight(t, x, out);
}

/* The nbi_weight_provider callback. Parameters come in the order of a .dat, a tied head last. */
static enum nb_status provide_weight(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                                     struct nbi_weight *out)
{
    struct nbi_train_params *t = ctx;
    bool second_head = t->config->tied && p->def->flags & NBI_MAY_TIE;
    bool tied = second_head && has_tied_head(t->config, t->store, &t->opts);
    if (second_head && !tied && !(t->store && nbi_store_find(t->store, p->name)))
        return NB_ENOTFOUND;
    struct nbi_train_param *x = &t->tensors[t->count++];
    *x = describe(t->config, t->store, &t->opts, p);
    place(t, x, tied);
    if (!x->trained) {
        x->weight = out;
        return t->store ? nbi_weight_load(t->store, be, p, x->on_host ? NULL : &x->memory, out)
                        : nbi_fail(NB_EINVAL, "a random model is trained as a whole");
    }
    if (!tied)
        return nbi_context(make_param(t, x, out), "'%s'", p->name);
    x->tied_to = &t->tensors[0];
    x->master = x->tied_to->master;
    x->grad = x->tied_to->grad;
    return make_weight(t, x, out);
}

/* ---- all parameters ---- */

static enum nb_status set_grads(struct nbi_train_params *t)
{
    const struct nbi_config *c = t->config;
    t->grads.first_layer = t->first_layer;
    t->grads.bf16 = t->opts.bf16_grads;
    t->grads.slice_rows = slice_rows_of(&t->opts);
    t->grads.layers = calloc((size_t)c->layers, sizeof *t->grads.layers);
    if (!t->grads.layers)
        return nbi_fail_memory("gradients", (size_t)c->layers * sizeof *t->grads.layers);
    for (int64_t i = 0; i < t->count; i++)
        *nbi_param_grad(&t->grads, &t->tensors[i].param) = t->tensors[i].grad;
    if (!t->weights.own_head)
        t->grads.head = t->grads.embed;
    return NB_OK;
}

/* Bytes of t->amax for `count` tensors. */
static int64_t amax_bytes(const struct nbi_train_params *t, int64_t count)
{
    bool any = has_tensor_scales(t->store) && t->opts.precision == NB_PRECISION_NVFP4;
    return any ? count * (int64_t)sizeof(float) : 0;
}

static enum nb_status alloc_amax(struct nbi_train_params *t)
{
    int64_t bytes = amax_bytes(t, t->count);
    t->has_tensor_scale = bytes > 0;
    if (!t->has_tensor_scale)
        return NB_OK;
    t->host_amax = malloc((size_t)bytes);
    if (!t->host_amax)
        return nbi_fail_memory("tensor scales", (size_t)bytes);
    return t->be->alloc(t->be, "tensor scales", bytes, &t->amax);
}

enum nb_status nbi_train_params_init(struct nbi_train_params *t, struct nbi_stream *stream,
                                     struct nbi_backend *be, const struct nbi_config *c,
                                     struct nbi_store *store,
                                     const struct nbi_train_params_opts *opts)
{
    *t = (struct nbi_train_params){.be = be,
                                   .opts = *opts,
                                   .config = c,
                                   .store = store,
                                   .stream = stream,
                                   .first_layer = nbi_first_layer(c, opts->last_layers)};
    t->tensors = calloc((size_t)nbi_param_count(c) + 1, sizeof *t->tensors);
    if (!t->tensors)
        return nbi_fail_memory("parameters", (size_t)nbi_param_count(c) * sizeof *t->tensors);
    const struct nbi_weight_provider from = {provide_weight, t};
    enum nb_status rc = alloc_staging(t);
    if (rc == NB_OK)
        rc = alloc_blocks(t);
    if (rc == NB_OK)
        rc = nbi_weights_load(&t->weights, be, c, &from, opts->progress, opts->progress_ctx);
    free_staging(t);
    if (rc == NB_OK)
        rc = set_grads(t);
    if (rc == NB_OK)
        rc = alloc_amax(t);
    if (rc == NB_OK)
        rc = nbi_train_params_requantize(t, NBI_ALL_LAYERS);
    if (rc != NB_OK)
        nbi_train_params_release(t);
    return rc;
}

void nbi_train_params_release(struct nbi_train_params *t)
{
    struct nbi_backend *be = t->be;
    nbi_weights_release(&t->weights);
    for (int i = 0; i < NBI_PARAM_BLOCKS; i++)
        be->free(be, t->blocks[i].at);
    be->free(be, t->amax);
    free(t->host_amax);
    free(t->grads.layers);
    free(t->tensors);
    *t = (struct nbi_train_params){0};
}

void nbi_train_params_plan(struct nbi_backend *be, const struct nbi_config *c,
                           struct nbi_store *store, const struct nbi_train_params_opts *o,
                           struct nbi_train_params_plan *plan)
{
    struct nbi_train_params t = {.be = be,
                                 .opts = *o,
                                 .config = c,
                                 .store = store,
                                 .first_layer = nbi_first_layer(c, o->last_layers)};
    struct nbi_train_param x;
    measure_blocks(&t);
    *plan = (struct nbi_train_params_plan){.host = t.host_bytes,
                                           .slices = nbi_slice_count(c, slice_rows_of(o))};
    while (nbi_train_params_at(c, store, o, plan->tensors, &x))
        plan->tensors++;
    plan->amax = amax_bytes(&t, plan->tensors);
    for (int i = 0; i < NBI_PARAM_BLOCKS; i++)
        plan->blocks[i] = t.blocks[i].bytes;
}

/* ---- weights of the forward pass ---- */

/* Number of tensors from i on that share a tensor scale; 0: an earlier tensor counts i. */
static int64_t fused_count(const struct nbi_train_params *t, int64_t i)
{
    const struct nbi_train_param *x = &t->tensors[i];
    enum nbi_fuse fuse = x->param.def->fuse;
    int64_t n = 1;
    if (fuse == NBI_FUSE_NONE)
        return 1;
    if (i > 0 && x[-1].layer == x->layer && x[-1].param.def->fuse == fuse)
        return 0;
    while (i + n < t->count && x[n].layer == x->layer && x[n].param.def->fuse == fuse)
        n++;
    return n;
}

/* Sets one tensor scale for n tensors: the largest they have, doubled until all values fit. */
static void set_scale(struct nbi_train_param *x, const float *amaxes, int64_t n)
{
    float scale = 0, divisor = 0, amax = 0;
    for (int64_t i = 0; i < n; i++) {
        amax = fmaxf(amax, amaxes[i]);
        if (x[i].weight->tensor_scale <= scale)
            continue;
        scale = x[i].weight->tensor_scale;
        divisor = x[i].divisor;
    }
    if (!(scale > 0))
        scale = nbi_nvfp4_tensor_scale(amax);
    while (isfinite(amax) && !nbi_nvfp4_fits(amax, scale)) {
        scale *= 2;
        divisor /= 2;
    }
    for (int64_t i = 0; i < n; i++) {
        x[i].weight->tensor_scale = scale;
        x[i].divisor = divisor;
    }
}

static bool in_group(const struct nbi_train_param *x, int64_t layer)
{
    return x->trained && (layer == NBI_ALL_LAYERS || x->layer == layer);
}

static enum nb_status set_scales(struct nbi_train_params *t, int64_t layer)
{
    const int64_t size = sizeof(float);
    for (int64_t i = 0; i < t->count; i++) {
        const struct nbi_train_param *x = &t->tensors[i];
        if (in_group(x, layer) && x->has_tensor_scale)
            NBI_TRY(
                t->be->amax(t->stream, &(struct nbi_op_amax){.out = nbi_ptr_add(t->amax, i * size),
                                                             .x = x->master,
                                                             .dtype = x->dtype,
                                                             .n = x->count}));
    }
    NBI_TRY(t->be->download(t->stream, t->host_amax, t->amax, t->count * size));
    NBI_TRY(t->be->sync(t->stream));
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], layer) && t->tensors[i].has_tensor_scale &&
            fused_count(t, i) > 0)
            set_scale(&t->tensors[i], t->host_amax + i, fused_count(t, i));
    return NB_OK;
}

bool nbi_train_param_allows_fusing(const struct nbi_train_param *x)
{
    return x->trained && !x->tied_to && !uses_master(x) && !x->has_tensor_scale;
}

static enum nb_status requantize(struct nbi_train_params *t, int64_t layer, bool updated)
{
    if (t->has_tensor_scale)
        NBI_TRY(set_scales(t, layer));
    for (int64_t i = 0; i < t->count; i++) {
        const struct nbi_train_param *x = &t->tensors[i];
        if (!in_group(x, layer) || uses_master(x) || (updated && x->made_by_update))
            continue;
        NBI_TRY(
            t->be->requantize(t->stream, &(struct nbi_op_requantize){.w = *x->weight,
                                                                     .master = x->master,
                                                                     .dtype = x->dtype,
                                                                     .round_to = x->float_type}));
    }
    return NB_OK;
}

enum nb_status nbi_train_params_requantize(struct nbi_train_params *t, int64_t layer)
{
    return requantize(t, layer, false);
}

enum nb_status nbi_train_params_requantize_rest(struct nbi_train_params *t, int64_t layer)
{
    return requantize(t, layer, true);
}

enum nb_status nbi_train_params_masters(const struct nbi_train_params *t, struct nbi_weights *out)
{
    const struct nbi_weights *w = &t->weights;
    *out = *w;
    out->layers = malloc((size_t)t->config->layers * sizeof *out->layers);
    if (!out->layers)
        return nbi_fail_memory("layers", (size_t)t->config->layers * sizeof *out->layers);
    memcpy(out->layers, w->layers, (size_t)t->config->layers * sizeof *out->layers);
    for (int64_t i = 0; i < t->count; i++) {
        const struct nbi_train_param *x = &t->tensors[i];
        if (!x->trained)
            continue;
        *nbi_param_weight(out, &x->param) = (struct nbi_weight){.dtype = x->dtype,
                                                                .rows = x->param.shape[0],
                                                                .cols = x->param.shape[1],
                                                                .data = x->master,
                                                                .tensor_scale = 1,
                                                                .borrowed = true};
    }
    if (!w->own_head)
        out->head = out->embed;
    return NB_OK;
}
