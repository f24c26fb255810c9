/* optimizer.c - gradient statistics, AdamW tensor by tensor, then the weights from the masters. */
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

/* An nvfp4 moment holds values up to its tensor scale times this: the largest block scale is 448,
 * the largest code 6 for m and 1 for sqrt(v). */
#define M_RANGE (6.0f * 448.0f)
#define V_RANGE 448.0f

enum nb_status nbi_optimizer_init(struct nbi_optimizer *s, struct nbi_train_params *t,
                                  const struct nbi_optimizer_opts *opts)
{
    *s = (struct nbi_optimizer){.t = t, .opts = *opts};
    size_t n = (size_t)t->count;
    s->host_stats = calloc(n, 3 * sizeof *s->host_stats);
    s->host_running_max = calloc(n, 2 * sizeof *s->host_running_max);
    if (!s->host_stats || !s->host_running_max)
        return nbi_fail_memory("optimizer", n * 32);
    NBI_TRY(t->be->alloc(t->be, "optimizer", (int64_t)(n * 3 * sizeof(double)), &s->stats));
    return t->be->alloc(t->be, "optimizer", (int64_t)(n * 2 * sizeof(float)), &s->running_max);
}

void nbi_optimizer_release(struct nbi_optimizer *s)
{
    if (s->t) {
        s->t->be->free(s->t->be, s->stats);
        s->t->be->free(s->t->be, s->running_max);
    }
    free(s->host_stats);
    free(s->host_running_max);
    *s = (struct nbi_optimizer){0};
}

/* Whether x is in the group and has a gradient of its own. */
static bool in_group(const struct nbi_train_param *x, int64_t group)
{
    return x->trained && !x->tied_to && (group == NBI_ALL_LAYERS || x->layer == group);
}

static enum nb_status gather_stats(struct nbi_optimizer *s, int64_t group, double *squares,
                                   int64_t *nonfinite)
{
    struct nbi_train_params *t = s->t;
    const int64_t row = 3 * (int64_t)sizeof(double);
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], group))
            NBI_TRY(t->be->grad_stats(
                t->stream, &(struct nbi_op_grad_stats){.out = nbi_ptr_add(s->stats, i * row),
                                                       .grad = t->tensors[i].grad,
                                                       .n = t->tensors[i].count}));
    NBI_TRY(t->be->download(t->stream, s->host_stats, s->stats, t->count * row));
    NBI_TRY(t->be->sync(t->stream));
    *squares = 0;
    *nonfinite = 0;
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], group)) {
            *squares += s->host_stats[3 * i];
            *nonfinite += (int64_t)s->host_stats[3 * i + 2];
        }
    return NB_OK;
}

/* The scales of nvfp4 moments must be known before the moments are: they come from upper bounds
 * of the new |m| and sqrt(v), with amax of the gradient after clipping. */
static void next_scales(const struct nbi_optimizer *s, const struct nbi_train_param *x, float amax,
                        struct nbi_op_adamw *op)
{
    const struct nbi_optimizer_opts *o = &s->opts;
    float m = o->beta1 * x->m_max + (1 - o->beta1) * amax;
    float v = sqrtf(o->beta2 * x->v_max * x->v_max + (1 - o->beta2) * amax * amax);
    op->m_scale[0] = x->m_scale;
    op->v_scale[0] = x->v_scale;
    op->m_scale[1] = fmaxf(m * 1.001f / M_RANGE, 1e-30f);
    op->v_scale[1] = fmaxf(v * 1.001f / V_RANGE, 1e-30f);
}

static enum nb_status update(struct nbi_optimizer *s, int64_t i, float grad_scale, float lr,
                             uint32_t number)
{
    struct nbi_train_params *t = s->t;
    struct nbi_train_param *x = &t->tensors[i];
    const struct nbi_optimizer_opts *o = &s->opts;
    struct nbi_op_adamw op = {
        .master = x->master,
        .dtype = x->dtype,
        .grad = x->grad,
        .m = x->m,
        .v = x->v,
        .running_max = nbi_ptr_add(s->running_max, i * 2 * (int64_t)sizeof(float)),
        .grad_scale = grad_scale,
        .lr = lr,
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .decay = x->param.def->flags & NBI_DECAY || o->decay_all ? o->decay : 0,
        .correct1 = (float)(1 - pow((double)o->beta1, number)),
        .correct2 = (float)(1 - pow((double)o->beta2, number)),
        .max_update = o->max_update,
        .seed = o->seed,
        .tensor = (uint32_t)x->index,
        .step = number};
    next_scales(s, x, (float)s->host_stats[3 * i + 1] * grad_scale, &op);
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, rows = o->chunk_rows;
    int64_t chunk = rows > 0 ? (rows * cols + 31) / 32 * 32 : x->count;
    for (op.first = 0; op.first < x->count; op.first += chunk) {
        op.count = x->count - op.first < chunk ? x->count - op.first : chunk;
        NBI_TRY(t->be->adamw(t->stream, &op));
    }
    x->m_scale = op.m_scale[1];
    x->v_scale = op.v_scale[1];
    return t->be->clear(t->stream, x->grad, x->count * (int64_t)sizeof(float));
}

static enum nb_status read_running_max(struct nbi_optimizer *s, int64_t group)
{
    struct nbi_train_params *t = s->t;
    NBI_TRY(t->be->download(t->stream, s->host_running_max, s->running_max,
                            t->count * 2 * (int64_t)sizeof(float)));
    NBI_TRY(t->be->sync(t->stream));
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], group)) {
            t->tensors[i].m_max = s->host_running_max[2 * i];
            t->tensors[i].v_max = s->host_running_max[2 * i + 1];
        }
    return NB_OK;
}

static enum nb_status drop_gradients(struct nbi_optimizer *s, int64_t group)
{
    struct nbi_train_params *t = s->t;
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], group))
            NBI_TRY(t->be->clear(t->stream, t->tensors[i].grad,
                                 t->tensors[i].count * (int64_t)sizeof(float)));
    return NB_OK;
}

enum nb_status nbi_optimizer_step(struct nbi_optimizer *s, int64_t group, float lr, uint32_t number,
                                  struct nbi_optimizer_result *result)
{
    struct nbi_train_params *t = s->t;
    double squares;
    int64_t nonfinite;
    NBI_TRY(gather_stats(s, group, &squares, &nonfinite));
    result->squares += squares;
    result->nonfinite += nonfinite;
    if (nonfinite > 0)
        return drop_gradients(s, group);
    double norm = sqrt(squares), clip = (double)s->opts.clip;
    float scale = clip > 0 && norm > clip ? (float)(clip / norm) : 1.0f;
    NBI_TRY(t->be->clear(t->stream, s->running_max, t->count * 2 * (int64_t)sizeof(float)));
    for (int64_t i = 0; i < t->count; i++)
        if (in_group(&t->tensors[i], group))
            NBI_TRY(update(s, i, scale, lr, number));
    NBI_TRY(read_running_max(s, group));
    return nbi_train_params_requantize(t, group);
}
