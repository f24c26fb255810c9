/* cmd_bench.c - how fast operations are here, against what the machine can do. */
#include <string.h>

#include "cli/cli.h"

struct bench_opts {
    struct cli_common common;
};

static json_t *result_json(const struct nb_bench_ops *b, bool *ok)
{
    json_t *rows = json_array();
    for (int i = 0; i < b->rows; i++)
        nbi_json_append(rows,
                        json_pack("{s:s,s:s,s:f,s:f,s:f}", "op", b->row[i].op, "path",
                                  b->row[i].path, "gb_per_s_per_core", b->row[i].gb_per_s_per_core,
                                  "gvalues_per_s_per_core", b->row[i].gvalues_per_s_per_core,
                                  "share",
                                  b->row[i].gb_per_s_per_core * b->threads / b->read_gb_per_s),
                        ok);
    return json_pack("{s:i,s:f,s:o}", "threads", b->threads, "read_gb_per_s", b->read_gb_per_s,
                     "ops", rows);
}

static void print_text(const struct nb_bench_ops *b)
{
    printf("%d threads; memory reads at %.1f GB/s\n\n", b->threads, b->read_gb_per_s);
    printf("%-16s  %-7s  %14s  %14s  %14s\n", "operation", "path", "GB/s per core",
           "Gvalues/s core", "share of reads");
    for (int i = 0; i < b->rows; i++)
        printf("%-16s  %-7s  %14.3f  %14.3f  %12.1f %%\n", b->row[i].op, b->row[i].path,
               b->row[i].gb_per_s_per_core, b->row[i].gvalues_per_s_per_core,
               100 * b->row[i].gb_per_s_per_core * b->threads / b->read_gb_per_s);
    printf("\nGB/s: bf16 source bytes for quantize, NVFP4 bytes for dequantize.\n");
}

static int run(void *opts)
{
    struct bench_opts *o = opts;
    if (strcmp(o->common.positional[0], "ops") != 0) {
        fprintf(stderr, "nibble bench: there is no bench '%s'; there is 'ops'\n",
                o->common.positional[0]);
        return CLI_EXIT_USAGE;
    }
    struct nb_bench_ops result;
    enum nb_status rc = nb_bench_codec(&result, (int)o->common.threads);
    if (rc != NB_OK)
        return cli_status(rc);
    if (o->common.json) {
        bool ok = true;
        json_t *json = result_json(&result, &ok);
        return cli_print_json(json, ok);
    }
    print_text(&result);
    return 0;
}

const struct cli_command cli_bench = {
    .name = "bench",
    .group = "look inside",
    .positional = "WHAT",
    .summary = "measure speed against what this machine can do",
    .text =
        "WHAT is ops: the NVFP4 codec on every code path of this CPU, in GB/s per core with all\n"
        "threads at work, and the machine's read bandwidth measured in the same run.",
    .examples = "  nibble bench ops\n  nibble bench ops --threads 1 --json\n",
    .opts_size = sizeof(struct bench_opts),
    .run = run,
};
