/* trainer.c - the training loop: micro-batches, forward, loss, backward, update; then log,
 * evaluation and checkpoint.
 *
 * Gradients accumulate over the micro-batches of a step, each scaled by 1 / (labels of the step).
 * A checkpoint is only taken between steps, when no parameter is half updated. */
#include <math.h>
#include <pthread.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sys.h"
#include "train/run.h"

/* ---- one step ---- */

struct update {
    struct nbi_run *r;
    float lr;
    int64_t passes;   /* micro-batches so far; each has its place in r->labels */
    int64_t anchored; /* labels that have a reference */
};

static enum nb_status update_group(void *ctx, int64_t group)
{
    struct update *u = ctx;
    u->r->updating = true;
    return nbi_optimizer_step(&u->r->optimizer, group, u->lr, (uint32_t)u->r->state.updates + 1);
}

static enum nb_status update_slice(void *ctx, int64_t slice)
{
    struct update *u = ctx;
    u->r->updating = true;
    return nbi_optimizer_step_slice(&u->r->optimizer, slice, u->lr,
                                    (uint32_t)u->r->state.updates + 1);
}

/* Completes the labels: the loss and, with --kl-base, the reference. */
static enum nb_status set_loss(struct nbi_run *r, const struct nbi_microbatch *batch,
                               struct update *u)
{
    struct nbi_labels *l = &r->train_pass.labels;
    int64_t count;
    l->kind = r->opts->loss;
    if (!(r->opts->kl_base > 0))
        return NB_OK;
    l->kl_scale = l->scale * (float)r->opts->kl_base;
    NBI_TRY(nbi_kl_anchor_set(&r->kl_anchor, batch, l, &count));
    u->anchored += count;
    return NB_OK;
}

/* The losses of a micro-batch get memory of their own, so that the step waits for all of them
 * together. */
static void keep_losses(struct nbi_run *r, struct update *u)
{
    struct nbi_labels *l = &r->train_pass.labels;
    l->losses = r->losses + u->passes * 2 * r->train_pass.N;
    l->kls = l->losses + r->train_pass.N;
    r->labels[u->passes++] = *l;
}

/* Adds the gradients of one micro-batch; the first one writes them. With a fused step, updates each
 * layer on the way, and with slices embedding and head after them. */
static enum nb_status accumulate(struct nbi_run *r, const struct nbi_microbatch *batch, float scale,
                                 struct update *u)
{
    const struct nbi_weights *w = &r->params.weights;
    const struct nbi_backward_hook hook = {update_group, u};
    const struct nbi_slice_hook of_slices = {update_slice, u};
    const struct nbi_pass *pass = &r->train_pass.pass;
    struct nbi_grads grads = r->params.grads;
    grads.fresh = u->passes == 0;
    NBI_TRY(nbi_train_pass_set(&r->train_pass, batch));
    r->train_pass.labels.scale = scale;
    NBI_TRY(set_loss(r, batch, u));
    keep_losses(r, u);
    NBI_TRY(nbi_execute(w, &r->acts, r->stream, pass));
    NBI_TRY(nbi_loss(w, &r->acts, r->stream, pass, &r->train_pass.labels, &grads));
    NBI_TRY(nbi_backward(w, &r->acts, r->stream, pass, &grads, r->opts->fused_step ? &hook : NULL));
    if (grads.slice_rows == 0)
        return NB_OK;
    return nbi_backward_slices(w, &r->acts, r->stream, pass, &r->train_pass.labels, &grads,
                               &of_slices);
}

/* The losses of the step, whose passes have run. */
static struct nbi_loss_sums losses_of(const struct update *u)
{
    struct nbi_loss_sums all = {0};
    for (int64_t i = 0; i < u->passes; i++) {
        struct nbi_loss_sums one = nbi_loss_sums(&u->r->labels[i]);
        all.loss += one.loss;
        all.kl += one.kl;
    }
    return all;
}

/* Layers are updated in the order of the backward pass, as a fused step does. */
static enum nb_status update_all(struct update *u)
{
    struct nbi_run *r = u->r;
    if (!r->opts->fused_step && !r->opts->clip_by_layer)
        return update_group(u, NBI_ALL_LAYERS);
    for (int64_t i = r->config.layers - 1; i >= r->params.first_layer && !r->opts->fused_step; i--)
        NBI_TRY(update_group(u, i));
    return update_group(u, -1);
}

enum nb_status nbi_run_step(struct nbi_run *r, struct nb_train_progress *p)
{
    struct nbi_run_state *st = &r->state;
    struct nbi_optimizer_result result;
    struct update u = {.r = r, .lr = (float)nbi_learning_rate(&r->lr_schedule, st->step)};
    int64_t labels = 0;
    double start = nbi_now();
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        labels += r->microbatches[i].trained;
    nbi_run_phase(r, "zero_grad_done"); /* the first micro-batch writes the gradients */
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        if (r->microbatches[i].trained > 0)
            NBI_TRY(accumulate(r, &r->microbatches[i], 1.0f / (float)labels, &u));
    nbi_run_phase(r, "backward_done");
    if (labels > 0)
        NBI_TRY(update_all(&u));
    NBI_TRY(nbi_optimizer_finish(&r->optimizer, &result));
    nbi_run_phase(r, "optimizer_step_done");
    bool one_group = !r->opts->fused_step && !r->opts->clip_by_layer;
    bool skipped = result.nonfinite > 0;
    st->updates += labels > 0 && !(skipped && one_group);
    st->skipped += skipped;
    st->skipped_in_row = skipped ? st->skipped_in_row + 1 : 0;
    st->step++;
    r->updating = false;
    int64_t tokens = 0;
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        tokens += r->microbatches[i].tokens;
    double seconds = nbi_now() - start;
    const struct nbi_loss_sums sums = losses_of(&u);
    st->tokens += tokens;
    st->seconds += seconds;
    *p = (struct nb_train_progress){.step = st->step,
                                    .steps = r->steps,
                                    .loss = labels ? sums.loss / (double)labels : NAN,
                                    .lr = (double)u.lr,
                                    .grad_norm = skipped ? NAN : sqrt(result.squares),
                                    .tokens = st->tokens,
                                    .tokens_per_s = (double)tokens / seconds,
                                    .seconds_left = st->seconds / (double)st->step *
                                                    (double)(r->steps - st->step),
                                    .resident_bytes = nbi_current_rss(),
                                    .device_bytes = r->device_bytes,
                                    .skipped = st->skipped,
                                    .kl = u.anchored ? sums.kl / (double)u.anchored : NAN};
    return NB_OK;
}

/* ---- evaluation ---- */

static enum nb_status evaluate(struct nbi_run *r, struct nb_train_eval *e)
{
    struct nbi_weights masters;
    double loss, master;
    int64_t count;
    if (!nbi_eval_any(&r->eval))
        return NB_OK;
    NBI_TRY(nbi_run_evaluate(r, &r->params.weights, &loss, &count));
    *e = (struct nb_train_eval){.step = r->state.step, .tokens = count};
    e->loss = e->master_loss = loss / (double)count;
    if (r->opts->precision != NB_PRECISION_F32) {
        NBI_TRY(nbi_train_params_masters(&r->params, &masters));
        enum nb_status rc = nbi_run_evaluate(r, &masters, &master, &count);
        free(masters.layers);
        NBI_TRY(rc);
        e->master_loss = master / (double)count;
    }
    const struct nbi_log_eval line = {e->step, e->loss, exp(e->loss), e->tokens};
    if (e->step != r->eval_logged)
        NBI_TRY(nbi_run_note_eval(r, &line));
    if (r->opts->evaluated)
        r->opts->evaluated(r->opts->ctx, e);
    r->state.evaluated = e->step;
    return NB_OK;
}

/* ---- the run ---- */

static enum nb_status log_step(struct nbi_run *r, const struct nb_train_progress *p)
{
    const struct nbi_log_step line = {.step = p->step,
                                      .loss = p->loss,
                                      .lr = p->lr,
                                      .grad_norm = p->grad_norm,
                                      .tokens = p->tokens,
                                      .tokens_per_s = p->tokens_per_s,
                                      .seconds = r->state.seconds,
                                      .resident_bytes = p->resident_bytes,
                                      .device_bytes = p->device_bytes};
    if (r->opts->progress)
        r->opts->progress(r->opts->ctx, p);
    return nbi_run_note_step(r, &line, p->kl);
}

static bool due(int64_t every, int64_t step)
{
    return every > 0 && step % every == 0;
}

/* ---- failures and warnings ---- */

void nbi_run_warn(const struct nbi_run *r, const char *then)
{
    char text[1024];
    snprintf(text, sizeof text, "%s; %s", nb_last_error(), then);
    if (r->opts->warn)
        r->opts->warn(r->opts->ctx, text);
}

/* The first failure of several. */
struct outcome {
    enum nb_status rc;
    char text[1024];
};

static void keep(struct outcome *o, enum nb_status rc)
{
    if (rc == NB_OK || o->rc != NB_OK)
        return;
    o->rc = rc;
    snprintf(o->text, sizeof o->text, "%s", nb_last_error());
}

static enum nb_status outcome_of(const struct outcome *o)
{
    return o->rc == NB_OK ? NB_OK : nbi_fail(o->rc, "%s", o->text);
}

static enum nb_status save(struct nbi_run *r)
{
    if (!r->opts->checkpoint_dir)
        return NB_OK;
    double start = nbi_now();
    enum nb_status rc = nbi_run_save(r);
    r->saved_at = nbi_now();
    r->save_took = r->saved_at - start;
    if (rc == NB_OK)
        r->saved_step = r->state.step;
    return rc;
}

/* Whether it is time for a checkpoint. Saving takes a tenth of a run's time at most. */
static bool save_is_due(const struct nbi_run *r)
{
    double seconds = fmax(60 * r->opts->save_minutes, 10 * r->save_took);
    return r->opts->checkpoint_dir && r->opts->save_minutes > 0 && r->state.step > r->saved_step &&
           nbi_now() - r->saved_at >= seconds;
}

static void save_or_warn(struct nbi_run *r)
{
    if (save(r) == NB_OK || r->save_failed)
        return;
    nbi_run_warn(r, "training goes on without that checkpoint");
    r->save_failed = true;
}

/* ---- between steps ---- */

/* Evaluates, and stops the run if perplexity is above its limit or not a number. An evaluation that
 * is only made because the run ends does not enter its state: a longer run would not make it. */
static enum nb_status evaluate_and_judge(struct nbi_run *r, struct nb_train_result *out)
{
    struct nbi_run_state *s = &r->state;
    const double limit = r->opts->stop_if_ppl_rises;
    NBI_TRY(evaluate(r, &out->eval));
    if (!(limit > 0))
        return NB_OK;
    double loss = out->eval.loss, best = fmin(s->best_loss, loss);
    if (s->step == 0 && !isfinite(loss))
        return nbi_fail(NB_EVALUE, "--stop-if-ppl-rises: the perplexity of the model as it is read "
                                   "is not finite");
    out->stopped = !(exp(loss - best) <= 1 + limit / 100);
    if (!due(r->opts->eval_every, s->step))
        return NB_OK;
    s->best_loss = best;
    s->stopped = out->stopped;
    if (s->stopped)
        return NB_OK;
    s->accepted = s->step;
    return r->opts->checkpoint_dir ? nbi_run_save_accepted(r) : NB_OK;
}

static enum nb_status pause_run(struct nbi_run *r, struct nb_train_result *out)
{
    out->interrupted = true;
    out->last.step = r->state.step;
    nbi_cancel_ignore();
    return save(r);
}

/* A run that fails between steps saves a checkpoint first. */
static enum nb_status give_up(struct nbi_run *r, enum nb_status rc)
{
    struct outcome failed = {0};
    keep(&failed, rc);
    if (r->opts->checkpoint_dir && !r->updating && r->state.step > r->saved_step &&
        save(r) == NB_OK)
        nbi_log(NB_LOG_INFO, "saved a checkpoint of step %lld", (long long)r->state.step);
    return outcome_of(&failed);
}

/* ---- the loop ---- */

/* A run whose steps change nothing any more would not recover. If it is resumed nevertheless, it
 * gets as many steps again. */
static enum nb_status check_skipped(const struct nbi_run_state *s)
{
    if (s->skipped_in_row == 0 || s->skipped_in_row % NBI_SKIPPED_MAX != 0)
        return NB_OK;
    return nbi_fail(NB_EVALUE,
                    "stopped after step %lld: the gradients of the last %lld steps were not finite",
                    (long long)s->step, (long long)s->skipped_in_row);
}

static enum nb_status step_and_log(struct nbi_run *r, struct nb_train_result *out, bool *more)
{
    NBI_TRY(nbi_run_next_batches(r, more));
    if (!*more)
        return NB_OK;
    nbi_run_phase(r, "batch_ready");
    NBI_TRY(nbi_run_step(r, &out->last));
    NBI_TRY(log_step(r, &out->last));
    return check_skipped(&r->state);
}

/* One step, then the evaluation and the checkpoint that are due. A run that was interrupted in an
 * evaluation continues with that evaluation. */
static enum nb_status advance(struct nbi_run *r, struct nb_train_result *out, bool *more)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_run_state *s = &r->state;
    bool resumes_eval =
        nbi_eval_any(&r->eval) && due(o->eval_every, s->step) && s->evaluated < s->step;
    NBI_TRY(nbi_check_interrupt());
    if (!resumes_eval)
        NBI_TRY(step_and_log(r, out, more));
    if (!*more)
        return NB_OK;
    if (due(o->eval_every, s->step) && s->step < r->steps)
        NBI_TRY(evaluate_and_judge(r, out));
    if (s->step > 0 && (due(o->save_every, s->step) || save_is_due(r)))
        save_or_warn(r);
    return NB_OK;
}

static bool measured(const struct nbi_run *r, const struct nb_train_result *out)
{
    return out->eval.tokens > 0 && out->eval.step == r->state.step;
}

/* Chooses the result: the last model, or the last accepted one if perplexity has risen. */
static enum nb_status choose_result(struct nbi_run *r, struct nb_train_result *out)
{
    out->result_step = r->state.step;
    if (!out->stopped || !r->opts->checkpoint_dir)
        return NB_OK;
    if (r->saved_step < r->state.step)
        save_or_warn(r);
    r->saved_step = r->state.step; /* the parameters loaded next are of another step */
    out->result_step = r->state.accepted;
    return nbi_run_load_accepted(r);
}

/* What follows the last step and comes before the result. */
static enum nb_status conclude(struct nbi_run *r, struct nb_train_result *out)
{
    if (r->opts->stop_if_ppl_rises > 0 && !measured(r, out))
        NBI_TRY(evaluate_and_judge(r, out));
    nbi_run_look_at_loss(r);
    return choose_result(r, out);
}

/* Remembers the last logged evaluation. A run that ended before its result was written makes that
 * evaluation again and must not log it twice. */
static enum nb_status continue_log(struct nbi_run *r)
{
    struct nbi_history h;
    NBI_TRY(nbi_train_log_open(&r->log, r->opts->log, r->state.step));
    NBI_TRY(nbi_history_read(&h, r->opts->log));
    r->eval_logged = h.eval_count > 0 ? h.evals[h.eval_count - 1].step : -1;
    nbi_history_release(&h);
    return NB_OK;
}

static enum nb_status begin(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    r->eval_logged = -1;
    if (o->resume)
        NBI_TRY(nbi_run_open_checkpoint(r));
    NBI_TRY(nbi_run_kl_anchor(r));
    if (o->checkpoint_dir)
        NBI_TRY(nbi_run_fingerprint(r));
    NBI_TRY(nbi_test_prompts_run(&r->test_prompts, r, r->test_prompts.before));
    if (o->resume)
        NBI_TRY(nbi_run_resume(r));
    r->first_step = r->saved_step = r->state.step;
    r->saved_at = nbi_now();
    if (r->first_step == 0)
        NBI_TRY(nbi_run_look_at_length(r));
    if (!o->log)
        return NB_OK;
    return o->resume ? continue_log(r) : nbi_train_log_open(&r->log, o->log, -1);
}

/* ---- the end ---- */

/* An interruption after the result was written is not a failure. */
static void keep_or_pause(struct outcome *all, struct nb_train_result *out, enum nb_status rc)
{
    if (rc != NB_EINTERRUPTED) {
        keep(all, rc);
        return;
    }
    out->interrupted = true;
    nbi_cancel_ignore();
}

static enum nb_status last_save(struct nbi_run *r)
{
    enum nb_status rc = r->saved_step < r->state.step ? save(r) : NB_OK;
    if (rc == NB_OK || !r->opts->out)
        return rc;
    nbi_run_warn(r, "the result has been written");
    return NB_OK;
}

static void show_answers(const struct nbi_run *r)
{
    for (int64_t i = 0; i < r->test_prompts.count && r->opts->answered; i++) {
        const struct nb_train_answer a = nbi_test_prompts_at(&r->test_prompts, i);
        if (a.before && a.after)
            r->opts->answered(r->opts->ctx, &a);
    }
}

/* The result is written first, so that no later failure can lose it. */
static enum nb_status finish(struct nbi_run *r, struct nb_train_result *out)
{
    struct outcome all = {0};
    if (r->opts->out) {
        enum nb_status rc = nbi_run_export(r);
        if (rc != NB_OK)
            return give_up(r, rc);
        r->exported = out->exported = true;
    }
    if (!measured(r, out))
        keep_or_pause(&all, out, evaluate(r, &out->eval));
    keep_or_pause(&all, out, last_save(r));
    if (r->opts->out)
        keep(&all, nbi_run_report(r));
    if (out->interrupted || r->test_prompts.count == 0)
        return outcome_of(&all);
    keep_or_pause(&all, out, nbi_test_prompts_run(&r->test_prompts, r, r->test_prompts.after));
    if (r->opts->out)
        keep(&all, nbi_run_report(r));
    if (!out->interrupted)
        show_answers(r);
    return outcome_of(&all);
}

/* Writes the memory report even if the run failed; then the run's failure is returned. */
static enum nb_status report_memory(struct nbi_run *r, enum nb_status rc)
{
    struct outcome all = {0};
    keep(&all, rc);
    if (r->opts->memory_report && r->phase_count > 0)
        keep(&all, nbi_run_memory_report(r, r->opts->memory_report));
    return outcome_of(&all);
}

/* ---- a run that is stepped ---- */

struct nb_trainer {
    struct nb_train_opts opts; /* what it points to is the caller's */
    struct nbi_run run;
    struct nb_train_result result;
    bool ended;           /* finished or failed: nothing but closing is left */
    pthread_mutex_t lock; /* of shown */
    struct nb_train_result shown;
};

static void show(struct nb_trainer *t)
{
    pthread_mutex_lock(&t->lock);
    t->shown = t->result;
    pthread_mutex_unlock(&t->lock);
}

/* Ends the run with a status, and returns what the caller gets. */
static enum nb_status end(struct nb_trainer *t, enum nb_status rc)
{
    struct nbi_run *r = &t->run;
    t->ended = true;
    rc = report_memory(r, rc);
    if (r->exported)
        rc = nbi_in_place(rc, t->opts.out);
    t->result.peak_bytes = nbi_peak_rss();
    show(t);
    return rc;
}

/* A failure or an interruption of a step, after which a checkpoint is left. */
static enum nb_status stop(struct nb_trainer *t, enum nb_status rc)
{
    if (rc != NB_EINTERRUPTED)
        return end(t, give_up(&t->run, rc));
    NBI_TRY(end(t, pause_run(&t->run, &t->result)));
    return nbi_fail(NB_EINTERRUPTED, "interrupted after step %lld", (long long)t->run.state.step);
}

/* Opens the run; after a failure it is to be closed as well. */
static enum nb_status open_run(struct nb_trainer *t)
{
    struct nbi_run *r = &t->run;
    struct nb_train_result *out = &t->result;
    NBI_TRY(nb_train_plan(&t->opts, &out->plan));
    NBI_TRY(nbi_run_check_memory(&out->plan));
    enum nb_status rc = nbi_run_open(r, &t->opts);
    if (rc == NB_OK)
        rc = begin(r);
    if (r->be)
        snprintf(out->device, sizeof out->device, "%s", r->be->name);
    out->last = (struct nb_train_progress){.step = r->state.step,
                                           .steps = r->steps,
                                           .loss = NAN,
                                           .kl = NAN,
                                           .tokens = r->state.tokens,
                                           .skipped = r->state.skipped};
    show(t);
    return rc == NB_OK ? rc : end(t, rc);
}

/* *result gets what is known even if opening fails. */
static enum nb_status open_trainer(struct nb_trainer **out, const struct nb_train_opts *opts,
                                   struct nb_train_result *result)
{
    *out = NULL;
    *result = (struct nb_train_result){0};
    struct nb_trainer *t = calloc(1, sizeof *t);
    if (!t)
        return nbi_fail_memory("training run", sizeof *t);
    t->opts = *opts;
    pthread_mutex_init(&t->lock, NULL);
    enum nb_status rc = open_run(t);
    *result = t->result;
    if (rc == NB_OK)
        *out = t;
    else
        nb_trainer_close(t);
    return rc;
}

enum nb_status nb_trainer_open(struct nb_trainer **out, const struct nb_train_opts *opts)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nb_train_result result;
    return open_trainer(out, opts, &result);
}

void nb_trainer_close(struct nb_trainer *t)
{
    if (!t)
        return;
    nbi_run_close(&t->run);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static enum nb_status check_running(const struct nb_trainer *t)
{
    return t->ended ? nbi_fail(NB_EINVAL, "the training run has ended") : NB_OK;
}

enum nb_status nb_trainer_step(struct nb_trainer *t, bool *done)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(t->opts.cancel);
    struct nbi_run *r = &t->run;
    bool more = true;
    *done = false;
    NBI_TRY(check_running(t));
    if (r->state.step < r->steps && !r->state.stopped) {
        enum nb_status rc = advance(r, &t->result, &more);
        if (rc != NB_OK)
            return stop(t, rc);
    }
    show(t);
    *done = !more || r->state.step >= r->steps || r->state.stopped;
    return NB_OK;
}

void nb_trainer_status(struct nb_trainer *t, struct nb_train_result *result)
{
    pthread_mutex_lock(&t->lock);
    *result = t->shown;
    pthread_mutex_unlock(&t->lock);
}

enum nb_status nb_trainer_save(struct nb_trainer *t)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(t->opts.cancel);
    NBI_TRY(check_running(t));
    if (!t->opts.checkpoint_dir)
        return nbi_fail(NB_EINVAL, "there is no directory for checkpoints");
    return save(&t->run);
}

enum nb_status nb_trainer_finish(struct nb_trainer *t, struct nb_train_result *result)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(t->opts.cancel);
    *result = t->result;
    NBI_TRY(check_running(t));
    enum nb_status rc = conclude(&t->run, &t->result);
    rc = rc == NB_OK ? end(t, finish(&t->run, &t->result)) : stop(t, rc);
    *result = t->result;
    return rc;
}

enum nb_status nb_train(const struct nb_train_opts *o, struct nb_train_result *out)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct nb_trainer *t;
    enum nb_status rc = open_trainer(&t, o, out);
    if (rc == NB_OK && o->started)
        o->started(o->ctx, out);
    for (bool done = false; rc == NB_OK && !done;)
        rc = nb_trainer_step(t, &done);
    if (rc == NB_OK)
        rc = nb_trainer_finish(t, out);
    if (t)
        *out = t->result;
    nb_trainer_close(t);
    return out->interrupted && rc == NB_EINTERRUPTED ? NB_OK : rc;
}
