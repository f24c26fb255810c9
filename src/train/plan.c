/* plan.c - which settings bring a run into a given memory.
 *
 * All combinations are planned; of those that fit, one is of interest only if no other is at least
 * as good in every respect. */
#include <string.h>

#include "train/run.h"

#define COMBINATIONS (2 * 4 * 2 * 2) /* of recompute, state, master and fused */

/* In no respect worse. */
static bool as_good(const struct nb_train_fit *a, const struct nb_train_fit *b)
{
    return a->recompute <= b->recompute && a->batch_size >= b->batch_size &&
           a->moment_type <= b->moment_type && a->bf16_master <= b->bf16_master &&
           a->fused_step <= b->fused_step;
}

/* The fastest first, then the most precise. */
static int compare(const void *x, const void *y)
{
    const struct nb_train_fit *a = x, *b = y;
    int loss_a = (int)a->moment_type + a->bf16_master,
        loss_b = (int)b->moment_type + b->bf16_master;
    if (a->recompute != b->recompute)
        return a->recompute - b->recompute;
    if (a->batch_size != b->batch_size)
        return a->batch_size > b->batch_size ? -1 : 1;
    if (loss_a != loss_b)
        return loss_a - loss_b;
    if (a->fused_step != b->fused_step)
        return a->fused_step - b->fused_step;
    return (int)a->moment_type - (int)b->moment_type;
}

/* Combination k with rows of 1 / share of the batch; false: it cannot be trained. */
static bool choose(const struct nb_train_opts *o, int k, int64_t share, struct nb_train_opts *out)
{
    *out = *o;
    out->recompute = k & 1;
    out->fused_step = k >> 1 & 1;
    out->bf16_master = k >> 2 & 1;
    out->moment_type = (enum nb_moment_type)(k >> 3);
    out->batch_size = o->batch_size / share;
    /* Smaller batches accumulate to the same update, unless it is made in the backward pass. */
    if (!out->fused_step)
        out->grad_accum = o->grad_accum * share;
    return !(out->fused_step && o->grad_accum > 1);
}

static enum nb_status try(const struct nbi_run *r, const struct nb_train_opts *o,
                          struct nb_train_fit *fit)
{
    struct nb_train_plan plan;
    struct nbi_run varied = *r;
    varied.opts = o;
    NBI_TRY(nbi_run_plan(&varied, &plan));
    *fit = (struct nb_train_fit){.batch_size = o->batch_size,
                                 .grad_accum = o->grad_accum,
                                 .recompute = o->recompute,
                                 .fused_step = o->fused_step,
                                 .bf16_master = o->bf16_master,
                                 .moment_type = o->moment_type,
                                 .total = plan.total};
    return NB_OK;
}

struct search {
    struct nb_train_fit *all; /* that fit */
    int count;
    int64_t limit;
    struct nb_train_fit *smallest;
};

static enum nb_status try_all(const struct nbi_run *r, const struct nb_train_opts *o,
                              struct search *s)
{
    for (int64_t share = 1; o->batch_size % share == 0; share *= 2)
        for (int k = 0; k < COMBINATIONS; k++) {
            struct nb_train_opts varied;
            struct nb_train_fit fit;
            if (!choose(o, k, share, &varied))
                continue;
            NBI_TRY(try(r, &varied, &fit));
            if (s->smallest->total == 0 || fit.total < s->smallest->total)
                *s->smallest = fit;
            if (fit.total <= s->limit)
                s->all[s->count++] = fit;
        }
    return NB_OK;
}

/* Leaves what no other is as good as. */
static void thin_out(struct search *s)
{
    int kept = 0;
    qsort(s->all, (size_t)s->count, sizeof *s->all, compare);
    for (int i = 0; i < s->count; i++) {
        bool best = true;
        for (int j = 0; j < kept && best; j++) /* what is better has come before */
            best = !as_good(&s->all[j], &s->all[i]);
        if (best)
            s->all[kept++] = s->all[i];
    }
    s->count = kept;
}

enum nb_status nb_train_fit(const struct nb_train_opts *opts, int64_t limit,
                            struct nb_train_fit *fits, int *count, struct nb_train_fit *smallest)
{
    struct nbi_run r;
    struct search s = {.limit = limit, .smallest = smallest};
    memset(smallest, 0, sizeof *smallest);
    if (opts->batch_size < 1 || opts->grad_accum < 1)
        return nbi_fail(NB_EINVAL, "a batch needs at least one row");
    s.all = malloc((size_t)COMBINATIONS * 64 * sizeof *s.all);
    if (!s.all)
        return nbi_fail_memory("settings", (size_t)COMBINATIONS * 64 * sizeof *s.all);
    enum nb_status rc = nbi_run_open_plan(&r, opts);
    if (rc == NB_OK)
        rc = try_all(&r, opts, &s);
    nbi_run_close(&r);
    thin_out(&s);
    *count = s.count < *count ? s.count : *count;
    memcpy(fits, s.all, (size_t)*count * sizeof *fits);
    free(s.all);
    return rc;
}
