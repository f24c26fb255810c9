/* optimizer.c - gradient statistics, AdamW tensor by tensor, then the weights from the masters. */
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

/* Whether x is in the group and has a gradient of its own. */
static bool in_group(const struct nbi_train_param *x, int64_t group)
{
    return x->trained && !x->tied_to && x->slice_rows == 0 &&
           (group == NBI_ALL_LAYERS || x->layer == group);
}

static bool in_slices(const struct nbi_train_param *x)
{
    return x->trained && !x->tied_to && x->slice_rows > 0;
}

/* ---- groups ---- */

static int64_t group_count(const struct nbi_optimizer *s)
{
    return s->t->config->layers + 2 + s->slices;
}

static int64_t index_of(const struct nbi_optimizer *s, int64_t group)
{
    return group == NBI_ALL_LAYERS ? s->t->config->layers + 1 : group + 1;
}

static int64_t index_of_slice(const struct nbi_optimizer *s, int64_t slice)
{
    return s->t->config->layers + 2 + slice;
}

/* The record of a slice of tensor i. The head is the last tensor, the embedding the first. */
static int64_t slice_record(const struct nbi_optimizer *s, int64_t i, int64_t slice)
{
    return s->t->count + (i > 0 ? s->slices : 0) + slice;
}

/* Every tensor is in two groups, its own and that of all, or in those of its slices. */
static enum nb_status list_groups(struct nbi_optimizer *s)
{
    const struct nbi_train_params *t = s->t;
    int64_t layers = t->config->layers, n = 0;
    int32_t *tensors = malloc((size_t)(2 * s->record_count) * sizeof *tensors);
    if (!tensors)
        return nbi_fail_memory("optimizer", (size_t)(2 * s->record_count) * sizeof *tensors);
    for (int64_t i = 0; i < layers + 2; i++) {
        s->first[i] = n;
        for (int64_t k = 0; k < t->count; k++)
            if (in_group(&t->tensors[k], i <= layers ? i - 1 : NBI_ALL_LAYERS))
                tensors[n++] = (int32_t)k;
    }
    for (int64_t i = 0; i < s->slices; i++) {
        s->first[index_of_slice(s, i)] = n;
        for (int64_t k = 0; k < t->count; k++)
            if (in_slices(&t->tensors[k]))
                tensors[n++] = (int32_t)slice_record(s, k, i);
    }
    s->first[group_count(s)] = n;
    enum nb_status rc = t->be->upload(t->stream, s->tensors, tensors, n * (int64_t)sizeof *tensors);
    free(tensors);
    return rc;
}

/* Elements of x that one AdamW operation updates. */
static int64_t elements_at_once(const struct nbi_optimizer *s, const struct nbi_train_param *x)
{
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, rows = s->opts.chunk_rows;
    return rows > 0 ? (rows * cols + 31) / 32 * 32 : x->count;
}

/* AdamW makes a weight from its master in the same pass, if it has whole rows at a time. */
static void choose_fused(struct nbi_optimizer *s)
{
    for (int64_t i = 0; i < s->t->count; i++) {
        struct nbi_train_param *x = &s->t->tensors[i];
        int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, n = elements_at_once(s, x);
        x->made_by_update = nbi_train_param_allows_fusing(x) && (n >= x->count || n % cols == 0);
    }
}

void nbi_optimizer_plan(int64_t layers, int64_t tensors, int64_t slices,
                        int64_t bytes[NBI_OPTIMIZER_BLOCKS])
{
    int64_t records = tensors + 2 * slices;
    bytes[0] = records * (int64_t)sizeof(struct nbi_update_record);
    bytes[1] = (layers + 2 + slices) * (int64_t)sizeof(struct nbi_update_control);
    bytes[2] = 2 * records * (int64_t)sizeof(int32_t);
}

enum nb_status nbi_optimizer_init(struct nbi_optimizer *s, struct nbi_train_params *t,
                                  const struct nbi_optimizer_opts *opts)
{
    struct nbi_backend *be = t->be;
    *s = (struct nbi_optimizer){
        .t = t, .opts = *opts, .slices = nbi_slice_count(t->config, t->grads.slice_rows)};
    s->record_count = t->count + 2 * s->slices;
    choose_fused(s);
    size_t groups = (size_t)group_count(s);
    int64_t bytes[NBI_OPTIMIZER_BLOCKS];
    s->first = calloc(groups + 1, sizeof *s->first);
    s->host_controls = calloc(groups, sizeof *s->host_controls);
    s->queued = calloc(groups, sizeof *s->queued);
    if (!s->first || !s->host_controls || !s->queued)
        return nbi_fail_memory("optimizer", groups * sizeof *s->host_controls);
    nbi_optimizer_plan(t->config->layers, t->count, s->slices, bytes);
    NBI_TRY(be->alloc(be, "optimizer", bytes[0], &s->records));
    NBI_TRY(be->alloc(be, "optimizer", bytes[1], &s->controls));
    NBI_TRY(be->alloc(be, "optimizer", bytes[2], &s->tensors));
    return list_groups(s);
}

void nbi_optimizer_release(struct nbi_optimizer *s)
{
    if (s->t) {
        struct nbi_backend *be = s->t->be;
        be->free(be, s->records);
        be->free(be, s->controls);
        be->free(be, s->tensors);
    }
    free(s->first);
    free(s->host_controls);
    free(s->queued);
    *s = (struct nbi_optimizer){0};
}

/* ---- the update ---- */

static struct nbi_ptr record_at(const struct nbi_optimizer *s, int64_t i)
{
    return nbi_ptr_add(s->records, i * (int64_t)sizeof(struct nbi_update_record));
}

static struct nbi_ptr control_at(const struct nbi_optimizer *s, int64_t index)
{
    return nbi_ptr_add(s->controls, index * (int64_t)sizeof(struct nbi_update_control));
}

/* Elements [first, end) of tensor i, whose gradient begins with them, in the group `index`. */
struct part {
    int64_t i, record, index, first, end;
};

static struct part whole_of(const struct nbi_optimizer *s, int64_t i, int64_t group)
{
    return (struct part){i, i, index_of(s, group), 0, s->t->tensors[i].count};
}

static struct part slice_of(const struct nbi_optimizer *s, int64_t i, int64_t slice)
{
    const struct nbi_train_param *x = &s->t->tensors[i];
    int64_t values = x->slice_rows * x->param.shape[1], first = slice * values;
    return (struct part){i, slice_record(s, i, slice), index_of_slice(s, slice), first,
                         x->count - first < values ? x->count : first + values};
}

static enum nb_status measure(struct nbi_optimizer *s, const struct part *p)
{
    const struct nbi_train_param *x = &s->t->tensors[p->i];
    return s->t->be->grad_stats(s->t->stream,
                                &(struct nbi_op_grad_stats){.record = record_at(s, p->record),
                                                            .grad = x->grad,
                                                            .n = p->end - p->first,
                                                            .bf16 = x->grad_bf16});
}

static enum nb_status plan(struct nbi_optimizer *s, int64_t index)
{
    return s->t->be->update_plan(
        s->t->stream,
        &(struct nbi_op_update_plan){
            .control = control_at(s, index),
            .records = s->records,
            .tensors = nbi_ptr_add(s->tensors, s->first[index] * (int64_t)sizeof(int32_t)),
            .count = s->first[index + 1] - s->first[index],
            .clip = s->opts.clip,
            .beta1 = s->opts.beta1,
            .beta2 = s->opts.beta2});
}

static enum nb_status update(struct nbi_optimizer *s, const struct part *p, float lr,
                             uint32_t number)
{
    struct nbi_train_params *t = s->t;
    struct nbi_train_param *x = &t->tensors[p->i];
    const struct nbi_optimizer_opts *o = &s->opts;
    struct nbi_op_adamw op = {.control = control_at(s, p->index),
                              .record = record_at(s, p->record),
                              .master = x->master,
                              .dtype = x->dtype,
                              .grad = x->grad,
                              .grad_bf16 = x->grad_bf16,
                              .grad_first = p->first,
                              .m = x->m,
                              .v = x->v,
                              .lr = lr,
                              .beta1 = o->beta1,
                              .beta2 = o->beta2,
                              .eps = o->eps,
                              .decay =
                                  x->param.def->flags & NBI_DECAY || o->decay_all ? o->decay : 0,
                              .correct1 = (float)(1 - pow((double)o->beta1, number)),
                              .correct2 = (float)(1 - pow((double)o->beta2, number)),
                              .max_update = o->max_update,
                              .seed = o->seed,
                              .tensor = (uint32_t)x->index,
                              .step = number,
                              .round_to = x->float_type};
    int64_t chunk = elements_at_once(s, x);
    if (x->made_by_update)
        op.w = *x->weight;
    for (op.first = p->first; op.first < p->end; op.first += chunk) {
        op.count = p->end - op.first < chunk ? p->end - op.first : chunk;
        NBI_TRY(t->be->adamw(t->stream, &op));
    }
    return NB_OK;
}

enum nb_status nbi_optimizer_step(struct nbi_optimizer *s, int64_t group, float lr, uint32_t number)
{
    struct nbi_train_params *t = s->t;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < t->count; i++) {
            const struct part p = whole_of(s, i, group);
            if (in_group(&t->tensors[i], group))
                NBI_TRY(pass == 0 ? measure(s, &p) : update(s, &p, lr, number));
        }
        if (pass == 0)
            NBI_TRY(plan(s, index_of(s, group)));
    }
    s->queued[index_of(s, group)] = true;
    return nbi_train_params_requantize_rest(t, group);
}

enum nb_status nbi_optimizer_step_slice(struct nbi_optimizer *s, int64_t slice, float lr,
                                        uint32_t number)
{
    struct nbi_train_params *t = s->t;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < t->count; i++) {
            if (!in_slices(&t->tensors[i]))
                continue;
            const struct part p = slice_of(s, i, slice);
            NBI_TRY(pass == 0 ? measure(s, &p) : update(s, &p, lr, number));
        }
        if (pass == 0)
            NBI_TRY(plan(s, index_of_slice(s, slice)));
    }
    s->queued[index_of_slice(s, slice)] = true;
    return NB_OK;
}

enum nb_status nbi_optimizer_finish(struct nbi_optimizer *s, struct nbi_optimizer_result *result)
{
    struct nbi_train_params *t = s->t;
    int64_t groups = group_count(s);
    *result = (struct nbi_optimizer_result){0};
    NBI_TRY(t->be->download(t->stream, s->host_controls, s->controls,
                            groups * (int64_t)sizeof *s->host_controls));
    NBI_TRY(t->be->sync(t->stream));
    for (int64_t i = groups - 1; i >= 0; i--) { /* in the order of the backward pass */
        if (s->queued[i]) {
            result->squares += s->host_controls[i].squares;
            result->nonfinite += (int64_t)s->host_controls[i].nonfinite;
        }
        s->queued[i] = false;
    }
    return NB_OK;
}

/* ---- records ---- */

enum nb_status nbi_optimizer_read(struct nbi_optimizer *s, struct nbi_update_record *records)
{
    struct nbi_train_params *t = s->t;
    NBI_TRY(t->be->download(t->stream, records, s->records,
                            s->record_count * (int64_t)sizeof *records));
    return t->be->sync(t->stream);
}

enum nb_status nbi_optimizer_write(struct nbi_optimizer *s, const struct nbi_update_record *records)
{
    struct nbi_train_params *t = s->t;
    NBI_TRY(
        t->be->upload(t->stream, s->records, records, s->record_count * (int64_t)sizeof *records));
    return t->be->sync(t->stream);
}
