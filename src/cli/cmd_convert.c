/* cmd_convert.c - one model format to another, and to NVFP4. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/str.h"
#include "base/sys.h"
#include "cli/cli.h"

struct convert_opts {
    struct cli_common common;
    const char *model, *model_dir, *report;
    int dtype, layout, method;
    int64_t shard_mb;
    bool two_level;
    struct cli_list skip;
};

#define AT(field) offsetof(struct convert_opts, field)

/* All options of quantize; convert has those from CONVERT_FIRST on. */
#define CONVERT_FIRST 4

static const struct cli_opt options[] = {
    {"method", 0, CLI_CHOICE, AT(method), "rtn|4over6|sweep", "sweep", 0, 0,
     "method of choosing block scales", NULL},
    {"skip", 0, CLI_LIST, AT(skip), "PATTERN", NULL, 0, 0,
     "do not quantise these tensors: components of a name, or a pattern with * and ? (repeatable)",
     NULL},
    {"two-level", 0, CLI_FLAG, AT(two_level), NULL, NULL, 0, 0,
     "also store a scale per tensor: more accurate for small weights", NULL},
    {"report", 0, CLI_STRING, AT(report), "FILE.json", NULL, 0, 0,
     "write the error figures to FILE.json", NULL},
    {"dtype", 0, CLI_CHOICE, AT(dtype), "keep|f32|f16|bf16", "keep", 0, 0,
     "element type of the weights (quantize: of the unquantised ones)", NULL},
    {"layout", 0, CLI_CHOICE, AT(layout), "keep|modelopt|compressed-tensors", "keep", 0, 0,
     "how safetensors store NVFP4 (keep: as SRC does, or modelopt)", NULL},
    {"model", 'm', CLI_STRING, AT(model), "PATH", NULL, 0, 0, "the same as SRC", "weight"},
    {"model-dir", 0, CLI_STRING, AT(model_dir), "DIR", NULL, 0, 0,
     "directory of config and tokenizer, if they are not with SRC", NULL},
    {"shard-mb", 0, CLI_INT, AT(shard_mb), "N", NULL, 1, 1000000,
     "model directories: maximum size of a weights file in MB (default: 5000)", NULL},
};

/* Options without meaning for this target are refused, not ignored. */
static int check_usage(const struct cli_command *c, const struct convert_opts *o)
{
    const char *dst = o->common.positional[1];
    bool safetensors = nbi_has_extension(dst, ".safetensors");
    bool directory =
        !safetensors && !nbi_has_extension(dst, ".dat") && !nbi_has_extension(dst, ".gguf");
    const char *idle = o->layout && !safetensors && !directory ? "--layout"
                       : o->shard_mb && !directory             ? "--shard-mb"
                                                               : NULL;
    if (!idle)
        return 0;
    fprintf(stderr, "nibble %s: %s does not apply to '%s'; see 'nibble help %s'\n", c->name, idle,
            dst, c->name);
    return CLI_EXIT_USAGE;
}

static struct nb_convert_opts library_opts(const struct convert_opts *o, struct cli_progress *p)
{
    static const enum nb_out_dtype dtypes[] = {NB_OUT_KEEP, NB_OUT_F32, NB_OUT_F16, NB_OUT_BF16};
    return (struct nb_convert_opts){.src = o->common.positional[0],
                                    .dst = o->common.positional[1],
                                    .model_dir = o->model_dir,
                                    .dtype = dtypes[o->dtype],
                                    .layout = (enum nb_out_layout)o->layout,
                                    .shard_bytes = (uint64_t)o->shard_mb * 1000000,
                                    .threads = (int)o->common.threads,
                                    .progress = cli_progress_update,
                                    .progress_ctx = p};
}

static int run_convert(void *opts)
{
    struct convert_opts *o = opts;
    struct cli_progress p;
    int usage = check_usage(&cli_convert, o);
    if (usage)
        return usage;
    cli_progress_start(&p, &o->common, "convert");
    struct nb_convert_opts to = library_opts(o, &p);
    double start = nbi_now();
    enum nb_status rc = nb_convert(&to);
    cli_progress_end(&p);
    cli_in_place(rc == NB_OK ? to.dst : NULL);
    if (rc == NB_OK && o->common.json)
        return cli_print_json(json_pack("{s:o,s:o,s:f}", "src", cli_json_path(to.src), "dst",
                                        cli_json_path(to.dst), "seconds", nbi_now() - start),
                              true);
    if (rc == NB_OK && !o->common.quiet)
        printf("wrote %s\n", to.dst);
    return cli_status(rc);
}

static json_t *family_json(const struct nb_quant_family *f)
{
    return json_pack("{s:s,s:I,s:I,s:o,s:f,s:f}", "family", f->name, "tensors",
                     (json_int_t)f->tensors, "values", (json_int_t)f->values, "snr_db",
                     isfinite(f->snr_db) ? json_real(f->snr_db) : json_null(), "rel_mse",
                     f->rel_mse, "zeros", f->zeros);
}

static json_t *report_json(const struct convert_opts *o, const struct nb_quantize_report *r,
                           bool *ok)
{
    static const char *const methods[] = {"rtn", "4over6", "sweep"};
    json_t *families = json_array();
    for (int i = 0; i < r->families; i++)
        nbi_json_append(families, family_json(&r->family[i]), ok);
    return json_pack(
        "{s:o,s:o,s:s,s:b,s:o,s:o,s:I,s:I,s:f,s:I}", "src", cli_json_path(o->common.positional[0]),
        "dst", cli_json_path(o->common.positional[1]), "method", methods[o->method], "two_level",
        o->two_level, "families", families, "total", family_json(&r->total), "source_bytes",
        (json_int_t)r->source_bytes, "output_bytes", (json_int_t)r->output_bytes, "seconds",
        r->seconds, "peak_rss", (json_int_t)nbi_peak_rss());
}

static void print_family(const struct nb_quant_family *f)
{
    printf("%-10s  %7lld  %13lld  %8.2f  %9.3e  %6.2f %%\n", f->name, (long long)f->tensors,
           (long long)f->values, f->snr_db, f->rel_mse, 100 * f->zeros);
}

static void print_report(const struct convert_opts *o, const struct nb_quantize_report *r)
{
    char from[32], to[32], rss[32];
    printf("%-10s  %7s  %13s  %8s  %9s  %8s\n", "family", "tensors", "values", "SNR (dB)",
           "rel. MSE", "zeros");
    for (int i = 0; i < r->families; i++)
        print_family(&r->family[i]);
    print_family(&r->total);
    printf("wrote %s: %s from %s in %.1f s (%.2f GB/s), peak memory %s\n", o->common.positional[1],
           nbi_format_bytes(to, (double)r->output_bytes),
           nbi_format_bytes(from, (double)r->source_bytes), r->seconds,
           (double)r->source_bytes / r->seconds * 1e-9,
           nbi_format_bytes(rss, (double)nbi_peak_rss()));
}

/* The report's file is opened before the work, so that a bad path is found at once. */
static enum nb_status write_report(struct nbi_outfile *f, const struct convert_opts *o,
                                   const struct nb_quantize_report *report)
{
    bool ok = true;
    char *text = NULL;
    json_t *json = report_json(o, report, &ok);
    enum nb_status rc = nbi_json_text(ok ? json : NULL, &text);
    json_decref(json);
    if (rc == NB_OK)
        rc = nbi_outfile_write(f, 0, text, strlen(text));
    free(text);
    if (rc != NB_OK) {
        nbi_outfile_abort(f);
        return rc;
    }
    return nbi_outfile_commit(f);
}

static int run_quantize(void *opts)
{
    struct convert_opts *o = opts;
    struct cli_progress p;
    struct nbi_outfile *report_file = NULL;
    struct nb_quantize_report report;
    int usage = check_usage(&cli_quantize, o);
    if (usage)
        return usage;
    const char *const *paths = o->common.positional;
    if (o->report &&
        (nbi_path_same_target(o->report, paths[0]) || nbi_path_same_target(o->report, paths[1]) ||
         (nbi_path_exists(o->report) && nbi_path_in(o->report, paths[0])))) {
        fprintf(stderr, "nibble quantize: --report would overwrite '%s'\n", o->report);
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = o->report ? nbi_outfile_open(&report_file, o->report) : NB_OK;
    cli_progress_start(&p, &o->common, "quantize");
    struct nb_quantize_opts q = {.to = library_opts(o, &p),
                                 .method = (enum nb_quant_method)o->method,
                                 .two_level = o->two_level,
                                 .skip = o->skip.items};
    if (rc == NB_OK)
        rc = nb_quantize(&q, &report);
    cli_progress_end(&p);
    if (rc == NB_OK && report_file)
        rc = nbi_in_place(write_report(report_file, o, &report), paths[1]);
    else
        nbi_outfile_abort(report_file);
    if (rc != NB_OK)
        return cli_status(rc);
    cli_in_place(paths[1]);
    if (o->common.json) {
        bool ok = true;
        json_t *json = report_json(o, &report, &ok);
        return cli_print_json(json, ok);
    }
    if (!o->common.quiet)
        print_report(o, &report);
    return 0;
}

const struct cli_command cli_convert = {
    .name = "convert",
    .group = "convert",
    .positional = "SRC DST",
    .summary = "convert a model to another file format",
    .text = "Reads a model directory, .dat, .safetensors or .gguf file and writes DST. The file\n"
            "name extension of DST selects the format: .dat, .safetensors or .gguf; any other\n"
            "name makes a model directory. Tensors, NVFP4 included, are copied bit for bit unless\n"
            "--dtype gives another type. DST appears only when it is complete.",
    .examples = "  nibble convert Qwen3-4B model.gguf\n"
                "  nibble convert weights.dat Qwen3-4B-nvfp4 --model-dir Qwen3-4B "
                "--layout compressed-tensors\n",
    .options = options + CONVERT_FIRST,
    .option_count = sizeof options / sizeof *options - CONVERT_FIRST,
    .opts_size = sizeof(struct convert_opts),
    .model_at = AT(model),
    .run = run_convert,
};

const struct cli_command cli_quantize = {
    .name = "quantize",
    .group = "convert",
    .positional = "SRC DST",
    .summary = "quantise the weights of a model to NVFP4",
    .text = "Quantises every projection (q, k, v, o, gate, up, down) and the head to NVFP4 and\n"
            "writes DST as convert does; the embedding and the norms stay unquantised. A head\n"
            "that is tied to the embedding is stored separately, quantised; --skip lm_head keeps\n"
            "it tied, for programs that cannot read a quantised head. --skip takes components of\n"
            "a tensor name (mlp, layers.0, down_proj) or, with * and ?, a pattern for the whole\n"
            "name. Prints the signal-to-noise ratio, the relative squared error and the share of\n"
            "zeros for each family of tensors.",
    .examples = "  nibble quantize Qwen3-4B Qwen3-4B-nvfp4.dat\n"
                "  nibble quantize Qwen3-4B Qwen3-4B-nvfp4 --two-level --skip lm_head "
                "--skip layers.0\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct convert_opts),
    .model_at = AT(model),
    .run = run_quantize,
};
