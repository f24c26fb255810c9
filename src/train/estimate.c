/* estimate.c - how long a run would take on this machine.
 *
 * A few steps are measured over random weights and tokens: of the model itself if it is small, else
 * of one layer of it with a small vocabulary, and of fewer rows. Steps with one and with three
 * passes tell the time of a pass from that of an update. The first grows with the operations, the
 * second with the parameters. */
#include <math.h>

#include "base/clock.h"
#include "base/sys.h"
#include "train/run.h"

#define CPU_FLOPS      8e9 /* of a measured pass, per thread: about a sixth of a second */
#define GPU_FLOPS      1e13
#define PARAMETERS_MAX 50000000 /* of a model that is measured as it is */
#define VOCABULARY     8192     /* of one that is not */
#define ROW_MIN        64       /* tokens */
#define PASSES         3
#define ROUNDS         2

static double work_per_token(const struct nb_train_opts *o, const struct nb_train_plan *p)
{
    return p->flops_per_token + (o->recompute ? p->layer_flops_per_token : 0);
}

/* ---- what is measured ---- */

/* What a pass may take: rows are left out first, then the ends of rows. */
static void limit_tokens(struct nb_train_opts *o, double tokens)
{
    double rows = floor(tokens / (double)o->seq_len);
    if (rows < (double)o->batch_size)
        o->batch_size = rows > 1 ? (int64_t)rows : 1;
    if (tokens < (double)o->seq_len)
        o->seq_len = tokens > ROW_MIN ? (int64_t)tokens : ROW_MIN;
}

/* Makes r a run that takes little time, and *plan its plan. */
static enum nb_status shrink(struct nbi_run *r, struct nb_train_opts *o, struct nb_train_plan *plan)
{
    int threads = o->threads > 0 ? o->threads : nbi_cpu_count();
    double flops = plan->gpu ? GPU_FLOPS : CPU_FLOPS * threads;
    double row = work_per_token(o, plan) * (double)o->seq_len;
    if (plan->parameters > PARAMETERS_MAX || row > 2 * flops) {
        r->config.layers = 1;
        if (r->config.vocab_size > VOCABULARY)
            r->config.vocab_size = VOCABULARY;
        NBI_TRY(nbi_run_plan(r, plan));
    }
    limit_tokens(o, flops / work_per_token(o, plan));
    return nbi_run_plan(r, plan);
}

/* Settings that change no more than a few per cent, or nothing, are left out. */
static struct nb_train_opts settings_of(const struct nb_train_opts *o)
{
    struct nb_train_opts m = *o;
    m.synthetic = "the sizes of a model"; /* random weights and tokens */
    m.model = m.config = m.out = m.log = m.checkpoint_dir = m.replay = m.test_prompts = NULL;
    m.memory_report = NULL;
    m.data = m.eval_data = NULL;
    m.kl_base = m.stop_if_ppl_rises = 0;
    m.fused_step = m.head_slices = m.bf16_gradients = m.from_scratch = false;
    m.train_last_layers = 0; /* with random weights, everything is trained */
    m.grad_accum = PASSES;
    m.steps = INT32_MAX;
    m.epochs = 0;
    m.schedule = NB_SCHEDULE_CONSTANT;
    m.lr = 0; /* as if it trained */
    m.warmup = 0;
    m.stage = NULL;
    m.stage_progress = NULL;
    m.progress = NULL;
    return m;
}

/* ---- measuring ---- */

/* The seconds of a step of so many passes; *best: of the fastest so far. */
static enum nb_status time_step(struct nbi_run *r, struct nb_train_opts *o, int64_t passes,
                                double *best)
{
    struct nb_train_progress p;
    bool more;
    o->grad_accum = passes; /* at most as many as when the run was opened */
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_run_next_batches(r, &more));
    double start = nbi_now();
    NBI_TRY(nbi_run_step(r, &p));
    *best = fmin(*best, nbi_now() - start);
    return NB_OK;
}

static enum nb_status measure(struct nbi_run *r, struct nb_train_opts *o, double *pass,
                              double *update)
{
    double one = INFINITY, all = INFINITY, cold = INFINITY;
    NBI_TRY(time_step(r, o, 1, &cold));
    for (int i = 0; i < ROUNDS; i++) {
        NBI_TRY(time_step(r, o, 1, &one));
        NBI_TRY(time_step(r, o, PASSES, &all));
    }
    *pass = fmax(all - one, 0) / (PASSES - 1);
    *pass = fmin(*pass, one);
    *update = one - *pass;
    return NB_OK;
}

static enum nb_status measure_small(const struct nbi_run *r, struct nb_train_opts *o,
                                    struct nb_train_estimate *out, const struct nb_train_plan *full)
{
    struct nbi_run small = {.opts = o, .config = r->config, .be = r->be};
    struct nb_train_plan plan = *full;
    double pass, update, tokens = (double)(r->opts->batch_size * r->opts->seq_len);
    NBI_TRY(shrink(&small, o, &plan));
    out->step_seconds = out->tokens_per_s = NAN;
    if (nbi_run_check_memory(&plan) != NB_OK)
        return NB_OK;
    const struct nbi_config config = small.config;
    enum nb_status rc = nbi_run_open_random(&small, o, &config);
    if (rc == NB_OK)
        snprintf(out->device, sizeof out->device, "%s", small.be->name);
    if (rc == NB_OK)
        rc = measure(&small, o, &pass, &update);
    nbi_run_close(&small);
    NBI_TRY(rc);
    pass *= work_per_token(r->opts, full) * tokens /
            (work_per_token(o, &plan) * (double)(o->batch_size * o->seq_len));
    update *= (double)full->masters / (double)plan.masters;
    out->step_seconds = (double)r->opts->grad_accum * pass + update;
    out->tokens_per_s = (double)r->opts->grad_accum * tokens / out->step_seconds;
    return NB_OK;
}

/* ---- the estimate ---- */

static bool goes_by_epochs(const struct nb_train_opts *o)
{
    return o->epochs > 0 && o->data && o->data[0] && !nbi_run_random_tokens(o);
}

static enum nb_status estimate(struct nbi_run *r, struct nb_train_estimate *out)
{
    struct nb_train_opts o = settings_of(r->opts);
    struct nb_train_plan plan;
    out->steps = r->opts->steps;
    NBI_TRY(nbi_run_plan(r, &plan));
    if (goes_by_epochs(r->opts)) {
        NBI_TRY(nbi_run_open_data(r));
        out->steps = r->steps;
    }
    NBI_TRY(measure_small(r, &o, out, &plan));
    out->seconds = (double)out->steps * out->step_seconds;
    return NB_OK;
}

enum nb_status nb_train_estimate(const struct nb_train_opts *o, struct nb_train_estimate *out)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct nbi_run r;
    *out = (struct nb_train_estimate){0};
    if (o->steps <= 0 && !goes_by_epochs(o))
        return nbi_fail(NB_EINVAL, "how long a run takes depends on --steps, or on --epochs and "
                                   "the data");
    enum nb_status rc = nbi_run_open_plan(&r, o);
    if (rc == NB_OK)
        rc = estimate(&r, out);
    nbi_run_close(&r);
    return nbi_context(rc, "estimating the time of a run");
}
