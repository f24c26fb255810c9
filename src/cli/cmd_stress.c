/* cmd_stress.c - runs the KV cache through all its modes. */
#include <string.h>

#include "base/str.h"
#include "cli/model_options.h"

struct stress_opts {
    struct cli_common common;
    struct cli_run_opts run;
    int64_t iterations;
};

static const struct cli_opt options[] = {
    CLI_MODEL_OPTIONS(struct stress_opts, run),
    {"iterations", 'n', CLI_INT, offsetof(struct stress_opts, iterations), "N", "30", 1, 1000000,
     "number of iterations", NULL},
};

static json_t *report_json(const struct nb_stress_report *r, bool *ok)
{
    json_t *modes = json_array();
    for (int i = 0; i < r->case_count; i++)
        nbi_json_append(modes, json_string(r->cases[i].name), ok);
    return json_pack("{s:I,s:o,s:b,s:s,s:I,s:I,s:I,s:I,s:I,s:b,s:b,s:f}", "iterations",
                     (json_int_t)r->iterations, "modes", modes, "outputs_identical",
                     r->outputs_identical, "difference", r->difference, "rss_first",
                     (json_int_t)r->rss_first, "rss_last", (json_int_t)r->rss_last, "rss_growth",
                     (json_int_t)r->rss_growth, "rss_slack", (json_int_t)r->rss_slack,
                     "heap_growth", (json_int_t)r->heap_growth, "memory_judged", r->memory_judged,
                     "memory_flat", r->memory_flat, "seconds", r->seconds);
}

static void print_text(const struct nb_stress_report *r)
{
    char a[32], b[32];
    printf("%-28s  %8s  %10s\n", "way", "runs", "ms a run");
    for (int i = 0; i < r->case_count; i++)
        if (r->cases[i].runs)
            printf("%-28s  %8lld  %10.2f\n", r->cases[i].name, (long long)r->cases[i].runs,
                   1e3 * r->cases[i].seconds / (double)r->cases[i].runs);
    printf("\n%lld iteration%s in %.1f s; outputs %s\n", (long long)r->iterations,
           nbi_plural(r->iterations), r->seconds, r->outputs_identical ? "identical" : "DIFFER");
    if (r->iterations > 0)
        printf("memory %s after warming up, %s at the end: %s\n",
               nbi_format_bytes(a, (double)r->rss_first), nbi_format_bytes(b, (double)r->rss_last),
               !r->memory_judged ? "not judged (too few iterations, or a sanitizer holds it)"
               : r->memory_flat  ? "flat"
                                 : "GROWS");
}

/* Prints the problem on standard error, in one line. */
static int verdict(const struct nb_stress_report *r)
{
    if (!r->outputs_identical)
        fprintf(stderr, "nibble: %s\n", r->difference);
    else if (!r->memory_flat)
        fprintf(stderr,
                "nibble: memory grew by %lld bytes resident and %lld bytes of heap in %lld "
                "iterations\n",
                (long long)r->rss_growth, (long long)r->heap_growth, (long long)r->iterations);
    return r->outputs_identical && r->memory_flat ? 0 : CLI_EXIT_FAILED;
}

static int run_kv(struct stress_opts *o)
{
    struct nb_engine *engine = NULL;
    struct nb_stress_report report;
    struct cli_progress progress;
    bool ok = true;
    enum nb_status rc = cli_engine_open(&engine, &o->run, &o->common);
    cli_progress_begin(&progress, o->common.quiet ? NULL : stderr, "iterations", CLI_UNIT_ITEMS);
    const struct nb_stress_opts opts = {
        .iterations = o->iterations, .progress = cli_progress_update, .progress_ctx = &progress};
    if (rc == NB_OK)
        rc = nb_eval_stress(engine, &opts, &report);
    cli_progress_end(&progress);
    nb_engine_close(engine);
    if (rc != NB_OK)
        return cli_status(rc);
    int code = 0;
    if (o->common.json) {
        json_t *json = report_json(&report, &ok);
        code = cli_print_json(json, ok);
    } else {
        print_text(&report);
    }
    return code ? code : verdict(&report);
}

static int run(void *opts)
{
    struct stress_opts *o = opts;
    if (!o->run.model) {
        fprintf(stderr, "nibble stress: -m MODEL is missing; see 'nibble help stress'\n");
        return CLI_EXIT_USAGE;
    }
    return run_kv(o);
}

const struct cli_command cli_stress = {
    .name = "stress",
    .group = "diagnose",
    .positional = "WHAT",
    .what = "kv",
    .summary = "run the KV cache in every mode, repeatedly",
    .text = "kv: puts the same 24 tokens into sessions in every possible way (whole, token by\n"
            "token, without a cache, in chunks, truncated and continued, after a reused prefix,\n"
            "from snapshots, beside a second session) and generates 8 greedy tokens from each.\n"
            "Every iteration covers all types of cache; every second one uses exact products. For\n"
            "each type, ids and last logits must be identical, bit for bit, in all ways and all\n"
            "iterations. On a GPU, results of inexact products depend on how many tokens are\n"
            "processed together; there, each way must only repeat its own results.\n"
            "\n"
            "Resident memory must stay flat after the first quarter of the iterations (at least\n"
            "two): the line fitted through the rest may rise by 256 KiB, and the memory allocated\n"
            "by malloc by 16 KiB. With fewer than 6 iterations, or in a build with sanitizers\n"
            "(which hold back freed memory), memory is shown but not judged.\n"
            "\n"
            "The exit code is 1 if results differ or memory grows; standard error names the first\n"
            "difference.",
    .examples = "  nibble stress kv -m Qwen3-0.6B --iterations 10\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct stress_opts),
    .any_device = true,
    .run = run,
};
