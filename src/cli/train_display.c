/* train_display.c - lines about a training run on stderr; on a terminal, one that is redrawn. */
#include "cli/train_display.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/str.h"
#include "base/sys.h"

#define BAR 20

/* Begins a line on stderr, overwriting the progress line if there is one. */
static void begin_line(struct cli_training *o)
{
    if (o->drawn)
        fputs("\r\033[K", stderr);
    o->drawn = false;
}

/* Ends a line: on a terminal, the next one overwrites it. */
static void end_line(struct cli_training *o)
{
    fputs(o->terminal ? "" : "\n", stderr);
    o->drawn = o->terminal;
    fflush(stderr);
}

static void draw_bar(uint64_t done, uint64_t total)
{
    char bar[BAR + 1] = {0};
    for (uint64_t i = 0; i < BAR; i++)
        bar[i] = i * total < BAR * done ? '#' : '.';
    fprintf(stderr, "[%s] ", bar);
}

static void show_stage(void *ctx, const char *what)
{
    struct cli_training *o = ctx;
    if (o->common->quiet || !(o->terminal || o->common->verbose))
        return;
    begin_line(o);
    fprintf(stderr, "%s ...", what);
    end_line(o);
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
    begin_line(o);
    fprintf(stderr,
            "%.1f M parameters in %s, activations in %s, on %s: %lld steps of %lld tokens, %s of "
            "memory\n",
            (double)r->plan.parameters / 1e6, precisions[o->opts->precision],
            computes[r->plan.compute], where, (long long)r->last.steps,
            (long long)(o->opts->batch_size * o->opts->seq_len * o->opts->grad_accum),
            nbi_format_bytes(bytes, (double)r->plan.total));
}

static void show_step(void *ctx, const struct nb_train_progress *p)
{
    struct cli_training *o = ctx;
    char bytes[32];
    int64_t left = (int64_t)p->seconds_left;
    if (o->common->quiet)
        return;
    begin_line(o);
    if (o->terminal)
        draw_bar((uint64_t)p->step, (uint64_t)p->steps);
    fprintf(
        stderr, "step %lld/%lld  loss %.4f  lr %.3g  norm %.3g  %.1f tok/s  %s  %lld:%02lld left",
        (long long)p->step, (long long)p->steps, p->loss, p->lr, p->grad_norm, p->tokens_per_s,
        nbi_format_bytes(bytes, (double)(p->device_bytes ? p->device_bytes : p->resident_bytes)),
        (long long)(left / 60), (long long)(left % 60));
    if (!isnan(p->kl))
        fprintf(stderr, "  kl %.5f", p->kl);
    if (p->skipped > 0)
        fprintf(stderr, "  (%lld skipped)", (long long)p->skipped);
    end_line(o);
}

static void show_eval(void *ctx, const struct nb_train_eval *e)
{
    struct cli_training *o = ctx;
    if (o->common->quiet)
        return;
    begin_line(o);
    fprintf(stderr, "eval  step %lld  loss %.6f  perplexity %.4f  with master weights %.6f\n",
            (long long)e->step, e->loss, exp(e->loss), e->master_loss);
}

static void show_answer(void *ctx, const struct nb_train_answer *a)
{
    struct cli_training *o = ctx;
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
    begin_line(ctx);
    fprintf(stderr, "nibble: warning: %s\n", text);
}

/* The first character ends the progress line. */
#define WHEN_INTERRUPTED "\nthe step under way is finished; Ctrl-C again ends at once\n"

void cli_show_training(struct cli_training *o, struct nb_train_opts *opts)
{
    o->opts = opts;
    o->terminal = isatty(STDERR_FILENO) && !o->common->quiet;
    opts->stage = show_stage;
    opts->started = show_start;
    opts->progress = show_step;
    opts->evaluated = show_eval;
    opts->answered = show_answer;
    opts->warn = show_warning;
    opts->ctx = o;
    if (!o->common->quiet)
        cli_say_when_interrupted(&WHEN_INTERRUPTED[o->terminal ? 0 : 1]);
}

void cli_end_training(struct cli_training *o)
{
    if (o->drawn)
        fputc('\n', stderr);
    o->drawn = false;
}

void cli_show_part(void *ctx, uint64_t done, uint64_t total)
{
    struct cli_training *o = ctx;
    if (!o->terminal || total == 0)
        return;
    begin_line(o);
    draw_bar(done, total);
    fprintf(stderr, "%llu of %llu", (unsigned long long)done, (unsigned long long)total);
    end_line(o);
}
