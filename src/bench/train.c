/* train.c - measures training steps, next to the peak arithmetic rate of the device. */
#include <stdlib.h>

#include "backend/backend.h"
#include "base/stats.h"
#include "base/sys.h"
#include "nibble/tools.h"

struct timing {
    double *rates;
    int64_t count;
};

static void note_step(void *ctx, const struct nb_train_progress *p)
{
    struct timing *t = ctx;
    if (p->step > 1) /* the first warms up */
        t->rates[t->count++] = p->tokens_per_s;
}

static enum nb_status measure_peak(const struct nb_train_opts *o, struct nb_bench_train *out)
{
    struct nbi_backend_opts on = {.device = o->device, .threads = o->threads};
    struct nbi_backend *be;
    NBI_TRY(nbi_simd_parse(o->simd, &on.level));
    NBI_TRY(nbi_backend_open(&be, &on));
    out->threads = o->threads > 0 ? o->threads : nbi_cpu_count();
    bool gpu = nbi_backend_has(be, NBI_CAP_OWN_MEMORY);
    snprintf(out->device, sizeof out->device, "%s", be->name);
    out->peak_flops_per_s = 2 * be->roofline_f32(be) * (gpu ? 1 : out->threads);
    be->close(be);
    return NB_OK;
}

enum nb_status nb_bench_train(const struct nb_train_opts *o, int64_t steps,
                              struct nb_bench_train *out)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct timing t = {0};
    struct nb_train_opts opts = *o;
    struct nb_train_result result;
    struct nb_bench_train found = {0};
    if (steps < 1)
        return nbi_fail(NB_EINVAL, "%lld steps to measure", (long long)steps);
    t.rates = calloc((size_t)steps, sizeof *t.rates);
    if (!t.rates)
        return nbi_fail_memory("times of steps", (size_t)steps * sizeof *t.rates);
    opts.random_tokens = true;
    opts.data = opts.eval_data = NULL;
    opts.out = opts.log = opts.checkpoint_dir = opts.test_prompts = opts.memory_report = NULL;
    opts.steps = steps + 1;
    opts.epochs = opts.eval_every = opts.save_every = 0;
    opts.stage = NULL;
    opts.started = NULL;
    opts.progress = note_step;
    opts.evaluated = NULL;
    opts.answered = NULL;
    opts.warn = NULL;
    opts.ctx = &t;
    enum nb_status rc = measure_peak(o, &found);
    if (rc == NB_OK)
        rc = nb_train(&opts, &result);
    if (rc == NB_OK && result.interrupted)
        rc = nbi_fail(NB_EINTERRUPTED, "interrupted");
    if (rc == NB_OK) {
        found.plan = result.plan;
        found.peak_bytes = result.peak_bytes;
        found.tokens_per_s = nbi_median(t.rates, (int)t.count);
        found.step_seconds =
            (double)(o->batch_size * o->seq_len * o->grad_accum) / found.tokens_per_s;
        found.flops_per_s = result.plan.flops_per_token * found.tokens_per_s;
        *out = found;
    }
    free(t.rates);
    return rc;
}
