/* advice.c - warnings about runs that cannot teach much, and what to change.
 *
 * Too few steps, a warm-up as long as the run, a loss that ends where it began: none of them is an
 * error, and none shows in the exit code. */
#include <math.h>

#include "base/log.h"
#include "train/run.h"

#define FEW_STEPS    5    /* of an epoch */
#define ENOUGH_STEPS 100  /* of a run, however short its epochs are */
#define LEAST_CHANGE 0.01 /* of the loss, relative */

/* ---- before the first step ---- */

/* The steps of one epoch, or FEW_STEPS + 1 if there are more. */
static enum nb_status count_epoch(struct nbi_run *r, int64_t *steps)
{
    const struct nb_train_opts *o = r->opts;
    struct nbi_loader loader = {0};
    struct nbi_loader_opts opts = r->loader.opts;
    const struct nbi_mix mix = {.main = &loader,
                                .replay = r->replay_data ? &r->replay_loader : NULL,
                                .share = o->replay_share};
    int64_t batches = 0;
    opts.epochs = 1;
    enum nb_status rc = nbi_loader_init(&loader, &opts);
    if (rc == NB_OK)
        rc =
            nbi_mix_count(&mix, o->batch_size, o->seq_len, FEW_STEPS * o->grad_accum + 1, &batches);
    nbi_loader_release(&loader);
    *steps = (batches + o->grad_accum - 1) / o->grad_accum;
    return rc;
}

static void look_at_warmup(const struct nbi_run *r)
{
    int64_t warmup = r->lr_schedule.warmup, steps = r->steps;
    int64_t rising = warmup < steps ? warmup : steps;
    if (warmup > 0 && steps > 0 && steps < 2 * warmup)
        nbi_log(
            NB_LOG_WARN,
            "%lld of the run's %lld steps are warm-up, and the learning rate reaches %.0f %% of "
            "--lr; a shorter --warmup, or more --epochs or --steps, leaves more to learn in",
            (long long)rising, (long long)steps, 100 * (double)rising / (double)warmup);
}

enum nb_status nbi_run_look_at_length(struct nbi_run *r)
{
    int64_t epoch = 0;
    look_at_warmup(r);
    if (!r->data || r->steps >= ENOUGH_STEPS)
        return NB_OK;
    NBI_TRY(count_epoch(r, &epoch));
    if (epoch > FEW_STEPS)
        return NB_OK;
    r->epoch_steps = epoch;
    nbi_log(NB_LOG_WARN,
            "an epoch is %lld step%s (%lld samples), and the run has %lld: so few updates teach "
            "little; a smaller --batch-size or more --epochs make more of them, a higher --lr "
            "larger ones",
            (long long)epoch, epoch == 1 ? "" : "s",
            (long long)nbi_dataset_stats(r->data)->examples, (long long)r->steps);
    return NB_OK;
}

/* ---- after the last step ---- */

struct mean {
    double mean, error; /* its standard error; 0: one value */
};

static struct mean mean_of(const struct nbi_log_step *steps, size_t count)
{
    double sum = 0, squares = 0, n = (double)count;
    for (size_t i = 0; i < count; i++)
        sum += steps[i].loss;
    for (size_t i = 0; i < count; i++)
        squares += (steps[i].loss - sum / n) * (steps[i].loss - sum / n);
    return (struct mean){sum / n, count > 1 ? sqrt(squares / (n - 1) / n) : 0};
}

/* Compares the first steps with the last ones: an epoch each if that is known and there are two,
 * since both have seen the same data then; otherwise a third of the run each, whose losses may
 * differ by what batches differ. */
void nbi_run_look_at_loss(const struct nbi_run *r)
{
    const struct nbi_history *h = &r->history;
    size_t epoch = (size_t)r->epoch_steps;
    bool by_epoch = epoch > 0 && h->step_count >= 2 * epoch;
    size_t count = by_epoch ? epoch : (h->step_count + 2) / 3;
    if (!r->data || r->first_step > 0 || h->step_count < 2)
        return;
    struct mean first = mean_of(h->steps, count);
    struct mean last = mean_of(h->steps + h->step_count - count, count);
    double noise = by_epoch ? 0 : 2 * hypot(first.error, last.error);
    if (!(fabs(first.mean - last.mean) <= fmax(LEAST_CHANGE * fabs(first.mean), noise)))
        return; /* or it is not a number */
    nbi_log(NB_LOG_WARN,
            "the loss has not moved: %.4f at the beginning, %.4f at the end (of %zu step%s each); "
            "more --epochs, a smaller --batch-size or a higher --lr teach more",
            first.mean, last.mean, count, count == 1 ? "" : "s");
}
