/* cmd_plan.c - the memory of a training run by part, and the settings that would fit. */
#include <math.h>
#include <string.h>

#include "base/str.h"
#include "cli/fit.h"
#include "cli/status_line.h"
#include "cli/train_options.h"

/* ---- --fit ---- */

#define FITS_MAX 10

struct fits {
    struct nb_train_fit list[FITS_MAX], smallest;
    int count;
};

static enum nb_status find_fits(struct fits *f, const struct nb_train_opts *opts, double gib)
{
    f->count = FITS_MAX;
    return nb_train_fit(opts, gib, 0, f->list, &f->count, &f->smallest);
}

static int print_fits_json(const struct nb_train_opts *opts, double gib, json_t *plan, bool ok)
{
    struct fits f;
    enum nb_status rc = find_fits(&f, opts, gib);
    if (rc != NB_OK) {
        json_decref(plan);
        return cli_status(rc);
    }
    json_t *list = json_array();
    for (int i = 0; i < f.count; i++)
        nbi_json_append(list, cli_fit_json(&f.list[i]), &ok);
    nbi_json_set(plan, "fits", list, &ok);
    nbi_json_set(plan, "smallest", cli_fit_json(&f.smallest), &ok);
    int code = cli_print_json(plan, ok);
    return code || f.count > 0 ? code : CLI_EXIT_FAILED;
}

static int print_fits(const struct nb_train_opts *opts, double gib, bool gpu)
{
    struct fits f;
    char bytes[32], text[CLI_FIT_TEXT];
    enum nb_status rc = find_fits(&f, opts, gib);
    if (rc != NB_OK)
        return cli_status(rc);
    if (f.count == 0) {
        cli_nothing_fits(gib, &f.smallest);
        return CLI_EXIT_FAILED;
    }
    printf("\nwhat fits %s%g GiB, the fastest first, then the most precise:\n",
           gpu ? "a card of " : "", gib);
    for (int i = 0; i < f.count; i++)
        printf("%12s  %s\n", nbi_format_bytes(bytes, (double)f.list[i].total),
               cli_fit_text(text, &f.list[i]));
    return 0;
}

/* ---- the time ---- */

/* Whether the options say how long the run is, and the device that they name is there. */
static bool has_length(const struct cli_train_opts *o, const struct nb_train_plan *p)
{
    const char *device = o->common.device;
    int gpu;
    if (p->gpu && strcmp(device, "auto") != 0 &&
        (nb_device_parse(device, &gpu) != NB_OK || nb_gpu_check(gpu) != NB_OK))
        return false;
    return o->steps > 0 || (o->epochs > 0 && o->data.count > 0);
}

static enum nb_status measure(const struct cli_train_opts *o, const struct nb_train_opts *t,
                              struct nb_train_estimate *e)
{
    static const struct cli_status_part note = {"measuring some steps ...", 0};
    if (!o->common.quiet && cli_status_line_works())
        cli_status_line_draw(&note, 1);
    enum nb_status rc = nb_train_estimate(t, e);
    cli_status_line_clear();
    return rc;
}

static json_t *time_json(const struct nb_train_estimate *e)
{
    return json_pack("{s:s,s:I,s:o,s:o,s:o}", "device", e->device, "steps", (json_int_t)e->steps,
                     "seconds", cli_json_number(e->seconds), "step_seconds",
                     cli_json_number(e->step_seconds), "tokens_per_s",
                     cli_json_number(e->tokens_per_s));
}

static void print_time(const struct nb_train_estimate *e)
{
    double s = e->seconds;
    char time[64];
    if (!isfinite(s)) {
        printf("\nestimated time: unknown, this machine has no memory for measuring\n");
        return;
    }
    if (s < 60)
        snprintf(time, sizeof time, "%.1f s", s);
    else if (s < 3600)
        snprintf(time, sizeof time, "%.0f min", s / 60);
    else
        snprintf(time, sizeof time, "%.1f h", s / 3600);
    printf("\nestimated time on %s: %s, for %lld steps of %.3g s, %.1f tok/s\n", e->device, time,
           (long long)e->steps, e->step_seconds, e->tokens_per_s);
}

/* ---- the command ---- */

/* On a GPU in MiB, as nvidia-smi counts. */
static void print_part(const char *what, int64_t bytes, bool gpu)
{
    char text[32];
    if (gpu)
        printf("%-40s  %9.1f MiB\n", what, (double)bytes / (1 << 20));
    else
        printf("%-28s  %12s\n", what, nbi_format_bytes(text, (double)bytes));
}

static void print_plan(const struct nb_train_plan *p)
{
    bool bf16 = p->compute == NB_COMPUTE_BF16;
    const struct {
        const char *what;
        int64_t bytes;
        bool gpu_only, cpu_only;
    } parts[] = {{"master weights", p->masters, false, false},
                 {"weights of the forward pass", p->weights, false, false},
                 {"type of Adam's moments", p->moments, false, false},
                 {"gradients", p->gradients, false, false},
                 {bf16 ? "activations, bf16" : "activations, f32", p->activations, false, false},
                 {"scratch", p->scratch, false, false},
                 {"test prompts", p->prompts, true, false},
                 {"tables", p->tables, true, false},
                 {"blocks, rounded up", p->rounding, true, false},
                 {"context and libraries, as on an H200", p->context, true, false},
                 {"batches and tables", p->host, false, true},
                 {p->gpu ? "on the GPU" : "total", p->total, false, false},
                 {"on the host: batches, pinned memory", p->host, true, false}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (p->gpu ? !parts[i].cpu_only && parts[i].bytes > 0 : !parts[i].gpu_only)
            print_part(parts[i].what, parts[i].bytes, p->gpu);
    printf("\n%lld parameters, %.2f GFLOP a token\n", (long long)p->parameters,
           p->flops_per_token / 1e9);
}

static int run_plan(void *opts)
{
    struct cli_train_opts *o = opts;
    struct nb_train_opts t;
    struct nb_train_plan p;
    struct nb_train_estimate e;
    if (!cli_train_convert(o, &t))
        return CLI_EXIT_USAGE;
    enum nb_status rc = nb_train_plan(&t, &p);
    if (rc != NB_OK)
        return cli_status(rc);
    bool timed = has_length(o, &p), ok = true;
    if (timed)
        rc = measure(o, &t, &e);
    if (rc != NB_OK)
        return cli_status(rc);
    if (o->common.json) {
        json_t *plan = cli_plan_json(&p);
        nbi_json_set(plan, "estimate", timed ? time_json(&e) : json_null(), &ok);
        return o->fit > 0 ? print_fits_json(&t, o->fit, plan, ok) : cli_print_json(plan, ok);
    }
    print_plan(&p);
    if (timed)
        print_time(&e);
    return o->fit > 0 ? print_fits(&t, o->fit, p.gpu) : 0;
}

const struct cli_command cli_plan = {
    .name = "plan",
    .group = "train",
    .positional = "",
    .summary = "say what memory and how long a training run takes",
    .text = "Takes the options of 'nibble train' and prints what it would allocate, by part,\n"
            "without training. With --device cuda it plans for a GPU, accurate to the MiB and\n"
            "including the driver's share; no GPU needs to be present. docs/MEMORY.md explains\n"
            "the parts.\n"
            "\n"
            "If --steps is given, or --epochs and the data, it also estimates how long the steps\n"
            "take on this machine, by measuring a few: of the whole model if it is small,\n"
            "otherwise of one layer.\n"
            "\n"
            "--fit also tries all combinations of --recompute, --optimizer-state-mode,\n"
            "--master-dtype, --fused-step and smaller batches (which accumulate to the same\n"
            "update, except with --fused-step), for a GPU also of --weight-store, --grad-dtype\n"
            "and --head-slices. It lists at most ten that fit, the fastest first and among equals\n"
            "the most precise; settings that another one matches or beats in every respect are\n"
            "left out. If nothing fits, it prints the smallest, and the exit code is 1. For a\n"
            "GPU, GIB is its nominal size, of which half a GiB is left free.",
    .examples = "  nibble plan -m Qwen3-4B --precision nvfp4 --recompute block --fused-step\n"
                "  nibble plan -m Qwen3-4B --fit 16\n"
                "  nibble plan --synthetic 4b --device cuda --fit 24 --seq-len 2048\n",
    .options = cli_train_options,
    .option_count = CLI_TRAIN_OPTIONS,
    .absent_device = true,
    .opts_size = sizeof(struct cli_train_opts),
    .run = run_plan,
};
