/* train_display.c - lines about a training run on stderr; on a terminal, one that is redrawn. */
#include "cli/train_display.h"

#include <math.h>
#include <string.h>

#include "base/str.h"
#include "base/sys.h"
#include "cli/status_line.h"

static void show_stage(void *ctx, const char *what)
{
    struct cli_training *o = ctx;
    char text[80];
    if (o->common->quiet)
        return;
    cli_progress_begin(&o->part, stderr, what, CLI_UNIT_ITEMS);
    snprintf(text, sizeof text, "%s ...", what);
    if (o->terminal)
        cli_status_line_draw(&(struct cli_status_part){text, 0}, 1);
    else if (o->common->verbose)
        fprintf(stderr, "%s\n", text);
}

void cli_show_part(void *ctx, uint64_t done, uint64_t total)
{
    struct cli_training *o = ctx;
    if (total > 0 && !o->common->quiet)
        cli_progress_update(&o->part, done, total);
}

static void show_start(void *ctx, const struct nb_train_result *r)
{
    struct cli_training *o = ctx;
    static const char *const precisions[] = {NB_PRECISION_LIST(NB_ENUM_NAME)};
    static const char *const computes[] = {NB_COMPUTE_LIST(NB_ENUM_NAME)};
    enum nbi_simd level;
    char bytes[32], where[160], gpu[128];
    if (o->common->quiet || nbi_simd_parse(o->opts->simd, &level) != NB_OK)
        return;
    if (strcmp(r->device, "cpu") == 0)
        snprintf(where, sizeof where, "the CPU (%s, %d threads)", nbi_simd_name(level),
                 o->opts->threads > 0 ? o->opts->threads : nbi_cpu_count());
    else
        snprintf(where, sizeof where, "%s%s", r->device, cli_gpu_name(gpu));
    cli_status_line_clear();
    fprintf(stderr,
            "%.1f M parameters in %s, activations in %s, on %s: %lld steps of %lld tokens, %s of "
            "memory\n",
            (double)r->plan.parameters / 1e6, precisions[o->opts->precision],
            computes[r->plan.compute], where, (long long)r->last.steps,
            (long long)(o->opts->batch_size * o->opts->seq_len * o->opts->grad_accum),
            nbi_format_bytes(bytes, (double)r->plan.total));
}

#define STEP_PARTS 10

/* The texts of a step's line. */
struct step_texts {
    char bar[CLI_BAR + 3], part[STEP_PARTS][64];
};

/* The parts point into t; parts[0] is the bar. */
static void format_step(struct cli_status_part parts[STEP_PARTS], struct step_texts *t,
                        const struct nb_train_progress *p)
{
    char bytes[32];
    int64_t left = (int64_t)p->seconds_left;
    *t = (struct step_texts){0};
    cli_bar(t->bar, p->steps > 0 ? (double)p->step / (double)p->steps : 0);
    snprintf(t->part[1], 64, "step %lld/%lld", (long long)p->step, (long long)p->steps);
    snprintf(t->part[2], 64, "loss %.4f", p->loss);
    snprintf(t->part[3], 64, "lr %.3g", p->lr);
    snprintf(t->part[4], 64, "norm %.3g", p->grad_norm);
    snprintf(t->part[5], 64, "%.1f tok/s", p->tokens_per_s);
    snprintf(
        t->part[6], 64, "%s",
        nbi_format_bytes(bytes, (double)(p->device_bytes ? p->device_bytes : p->resident_bytes)));
    snprintf(t->part[7], 64, "%lld:%02lld left", (long long)(left / 60), (long long)(left % 60));
    if (!isnan(p->kl))
        snprintf(t->part[8], 64, "kl %.5f", p->kl);
    if (p->skipped > 0)
        snprintf(t->part[9], 64, "(%lld skipped)", (long long)p->skipped);
    static const int ranks[STEP_PARTS] = {9, 0, 2, 7, 8, 4, 6, 1, 5, 3};
    for (int i = 0; i < STEP_PARTS; i++)
        parts[i] = (struct cli_status_part){i == 0 ? t->bar : t->part[i], ranks[i]};
}

static void show_step(void *ctx, const struct nb_train_progress *p)
{
    struct cli_training *o = ctx;
    struct cli_status_part parts[STEP_PARTS];
    struct step_texts texts;
    char line[640];
    if (o->common->quiet)
        return;
    format_step(parts, &texts, p);
    if (o->terminal) {
        cli_status_line_draw(parts, STEP_PARTS);
        if (p->step == p->steps)
            cli_status_line_keep();
    } else {
        cli_status_join(line, sizeof line, parts + 1, STEP_PARTS - 1, sizeof line);
        fprintf(stderr, "%s\n", line);
    }
}

static void show_eval(void *ctx, const struct nb_train_eval *e)
{
    struct cli_training *o = ctx;
    if (o->common->quiet)
        return;
    cli_status_line_clear();
    fprintf(stderr, "eval  step %lld  loss %.6f  perplexity %.4f  with master weights %.6f\n",
            (long long)e->step, e->loss, exp(e->loss), e->master_loss);
}

static void show_answer(void *ctx, const struct nb_train_answer *a)
{
    struct cli_training *o = ctx;
    cli_status_line_clear(); /* standard output may be the same terminal */
    if (!o->common->json) {
        printf("prompt: %s\nbefore: %s\nafter:  %s\n\n", a->prompt, a->before, a->after);
        return;
    }
    if (!o->answers)
        o->answers = json_array();
    bool ok = true;
    nbi_json_append(
        o->answers,
        json_pack("{s:s,s:s,s:s}", "prompt", a->prompt, "before", a->before, "after", a->after),
        &ok);
    o->answers_failed = o->answers_failed || !ok;
}

static void show_warning(void *ctx, const char *text)
{
    (void)ctx;
    cli_status_line_clear();
    fprintf(stderr, "nibble: warning: %s\n", text);
}

void cli_show_training(struct cli_training *o, struct nb_train_opts *opts)
{
    o->opts = opts;
    o->terminal = cli_status_line_works();
    opts->stage = show_stage;
    opts->stage_progress = cli_show_part;
    opts->started = show_start;
    opts->progress = show_step;
    opts->evaluated = show_eval;
    opts->answered = show_answer;
    opts->warn = show_warning;
    opts->ctx = o;
    if (!o->common->quiet)
        cli_say_when_interrupted("the step under way is finished; Ctrl-C again ends at once\n");
}
