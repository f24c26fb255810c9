/* trainer.c - the loop: batch, forward, loss, backward, update; and what happens between steps. */
#include <math.h>

#include "base/clock.h"
#include "base/sys.h"
#include "train/run.h"

/* ---- one step ---- */

struct update {
    struct nbi_run *r;
    float lr;
    struct nbi_step_result result;
    double loss, kl;  /* sums */
    int64_t anchored; /* labels that kl is the sum of */
};

static enum nb_status update_group(void *ctx, int64_t group)
{
    struct update *u = ctx;
    return nbi_step(&u->r->stepper, group, u->lr, (uint32_t)u->r->state.updates + 1, &u->result);
}

/* What the labels of the feed are to learn. */
static enum nb_status set_loss(struct nbi_run *r, const struct nbi_batch *batch, struct update *u)
{
    struct nbi_labels *l = &r->feed.labels;
    int64_t count;
    l->kind = r->opts->loss == NB_LOSS_SCALAR ? NBI_LOSS_SCALAR : NBI_LOSS_CE;
    if (!(r->opts->kl_base > 0))
        return NB_OK;
    l->kl_scale = l->scale * (float)r->opts->kl_base;
    NBI_TRY(nbi_base_set(&r->base, batch, l, &count));
    u->anchored += count;
    return NB_OK;
}

/* The gradients of one micro-batch; with a fused step the layers are updated on the way. */
static enum nb_status back(struct nbi_run *r, const struct nbi_batch *batch, float scale,
                           struct update *u)
{
    const struct nbi_weights *w = &r->t.weights;
    const struct nbi_backward_hook hook = {update_group, u};
    NBI_TRY(nbi_feed_set(&r->feed, batch));
    r->feed.labels.scale = scale;
    NBI_TRY(set_loss(r, batch, u));
    NBI_TRY(nbi_forward(w, &r->acts, r->stream, &r->feed.pass));
    NBI_TRY(nbi_loss(w, &r->acts, r->stream, &r->feed.pass, &r->feed.labels, &r->t.grads));
    u->loss += r->feed.labels.loss;
    u->kl += r->feed.labels.kl;
    return nbi_backward(w, &r->acts, r->stream, &r->feed.pass, &r->t.grads,
                        r->opts->fused_step ? &hook : NULL);
}

/* In the order of the backward pass, so that it is the same with a fused step. */
static enum nb_status update_all(struct update *u)
{
    struct nbi_run *r = u->r;
    if (!r->opts->fused_step && !r->opts->clip_by_layer)
        return update_group(u, NBI_ALL_LAYERS);
    for (int64_t i = r->config.layers - 1; i >= r->t.first_layer && !r->opts->fused_step; i--)
        NBI_TRY(update_group(u, i));
    return update_group(u, -1);
}

static enum nb_status one_step(struct nbi_run *r, struct nb_train_progress *p)
{
    struct nbi_run_state *st = &r->state;
    struct update u = {.r = r, .lr = (float)nbi_learning_rate(&r->schedule, st->step)};
    int64_t labels = 0;
    double start = nbi_now();
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        labels += r->micro[i].trained;
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        if (r->micro[i].trained > 0)
            NBI_TRY(back(r, &r->micro[i], 1.0f / (float)labels, &u));
    nbi_run_phase(r, "backward_done");
    if (labels > 0)
        NBI_TRY(update_all(&u));
    NBI_TRY(r->be->sync(r->stream));
    nbi_run_phase(r, "optimizer_step_done");
    bool whole = !r->opts->fused_step && !r->opts->clip_by_layer;
    bool skipped = u.result.nonfinite > 0;
    st->updates += labels > 0 && !(skipped && whole);
    st->skipped += skipped;
    st->step++;
    int64_t tokens = 0;
    for (int64_t i = 0; i < r->opts->grad_accum; i++)
        tokens += r->micro[i].tokens;
    double seconds = nbi_now() - start;
    st->tokens += tokens;
    st->seconds += seconds;
    *p = (struct nb_train_progress){.step = st->step,
                                    .steps = r->steps,
                                    .loss = labels ? u.loss / (double)labels : NAN,
                                    .lr = (double)u.lr,
                                    .grad_norm = skipped ? NAN : sqrt(u.result.squares),
                                    .tokens = st->tokens,
                                    .tokens_per_s = (double)tokens / seconds,
                                    .seconds_left = st->seconds / (double)st->step *
                                                    (double)(r->steps - st->step),
                                    .resident_bytes = nbi_resident(),
                                    .skipped = st->skipped,
                                    .kl = u.anchored ? u.kl / (double)u.anchored : NAN};
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
    NBI_TRY(nbi_run_evaluate(r, &r->t.weights, &loss, &count));
    *e = (struct nb_train_eval){.step = r->state.step, .tokens = count};
    e->loss = e->master_loss = loss / (double)count;
    if (r->opts->precision != NB_PRECISION_F32) {
        NBI_TRY(nbi_trainable_masters(&r->t, &masters));
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
                                      .resident_bytes = p->resident_bytes};
    if (r->opts->progress)
        r->opts->progress(r->opts->ctx, p);
    return nbi_run_note_step(r, &line, p->kl);
}

/* Whether perplexity has risen by more than it may. */
static bool has_risen(struct nbi_run *r, const struct nb_train_eval *e)
{
    double limit = r->opts->stop_if_ppl_rises;
    if (e->loss < r->state.best_loss)
        r->state.best_loss = e->loss;
    return limit > 0 && exp(e->loss - r->state.best_loss) > 1 + limit / 100;
}

static bool due(int64_t every, int64_t step)
{
    return every > 0 && step % every == 0;
}

static enum nb_status pause_run(struct nbi_run *r, struct nb_train_result *out)
{
    out->interrupted = true;
    out->last.step = r->state.step;
    nb_interrupt_clear();
    return r->opts->checkpoint_dir ? nbi_run_save(r) : NB_OK;
}

static enum nb_status step_and_log(struct nbi_run *r, struct nb_train_result *out, bool *more)
{
    NBI_TRY(nbi_run_next(r, more));
    if (!*more)
        return NB_OK;
    NBI_TRY(one_step(r, &out->last));
    return log_step(r, &out->last);
}

/* A step, the evaluation that is due behind it, and the checkpoint. Where an evaluation was
 * interrupted, the run goes on with that. */
static enum nb_status advance(struct nbi_run *r, struct nb_train_result *out, bool *more)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_run_state *s = &r->state;
    bool left = nbi_eval_any(&r->eval) && due(o->eval_every, s->step) && s->evaluated < s->step;
    NBI_TRY(nbi_check_interrupt());
    if (!left)
        NBI_TRY(step_and_log(r, out, more));
    if (!*more)
        return NB_OK;
    if (due(o->eval_every, s->step) && s->step < r->steps) {
        NBI_TRY(evaluate(r, &out->eval));
        out->stopped = out->eval.tokens > 0 && has_risen(r, &out->eval);
    }
    return o->checkpoint_dir && due(o->save_every, s->step) ? nbi_run_save(r) : NB_OK;
}

static enum nb_status train(struct nbi_run *r, struct nb_train_result *out)
{
    bool more = true;
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && more && r->state.step < r->steps && !out->stopped)
        rc = advance(r, out, &more);
    bool measured = out->eval.tokens > 0 && out->eval.step == r->state.step;
    if (rc == NB_OK && !measured)
        rc = evaluate(r, &out->eval);
    if (rc == NB_OK && r->opts->checkpoint_dir)
        rc = nbi_run_save(r);
    return rc == NB_EINTERRUPTED ? pause_run(r, out) : rc;
}

/* A run that ended before its result was written evaluates again: that is in its log already. */
static enum nb_status continue_log(struct nbi_run *r)
{
    struct nbi_history h;
    NBI_TRY(nbi_trainlog_open(&r->log, r->opts->log, r->state.step));
    NBI_TRY(nbi_history_read(&h, r->opts->log));
    r->eval_logged = h.eval_count > 0 ? h.evals[h.eval_count - 1].step : -1;
    nbi_history_release(&h);
    return NB_OK;
}

static enum nb_status begin(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    r->eval_logged = -1;
    NBI_TRY(nbi_run_base(r));
    if (o->resume)
        NBI_TRY(nbi_run_resume(r));
    if (!o->log)
        return NB_OK;
    return o->resume ? continue_log(r) : nbi_trainlog_open(&r->log, o->log, -1);
}

static enum nb_status finish(struct nbi_run *r)
{
    NBI_TRY(nbi_prompts_run(&r->prompts, r, r->prompts.after));
    if (r->opts->memory_report)
        NBI_TRY(nbi_run_memory_report(r, r->opts->memory_report));
    if (!r->opts->out)
        return NB_OK;
    NBI_TRY(nbi_run_export(r));
    return nbi_run_report(r);
}

enum nb_status nb_train(const struct nb_train_opts *o, struct nb_train_result *out)
{
    struct nbi_run r;
    *out = (struct nb_train_result){0};
    enum nb_status rc = nb_train_plan(o, &out->plan);
    if (rc == NB_OK)
        rc = nbi_run_check_memory(&out->plan);
    if (rc != NB_OK)
        return rc;
    rc = nbi_run_open(&r, o);
    if (rc == NB_OK)
        rc = begin(&r);
    out->last = (struct nb_train_progress){.step = r.state.step,
                                           .steps = r.steps,
                                           .loss = NAN,
                                           .kl = NAN,
                                           .tokens = r.state.tokens,
                                           .skipped = r.state.skipped};
    if (rc == NB_OK && o->started)
        o->started(o->ctx, out);
    if (rc == NB_OK)
        rc = nbi_prompts_run(&r.prompts, &r, r.prompts.before);
    if (rc == NB_OK)
        rc = train(&r, out);
    if (rc == NB_OK && !out->interrupted)
        rc = finish(&r);
    out->peak_bytes = nbi_peak_rss();
    nbi_run_close(&r);
    return rc;
}
