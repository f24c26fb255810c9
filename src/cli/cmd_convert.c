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
    const char *model_dir, *report;
    int dtype, layout, method;
    int64_t shard_mb;
    bool two_level;
    struct cli_list skip;
};

#define DTYPE_ROW                                                                                  \
    {                                                                                              \
        "dtype", 0, CLI_CHOICE, offsetof(struct convert_opts, dtype), "keep|f32|f16|bf16", "keep", \
            0, 0, DTYPE_HELP, NULL                                                                 \
    }
#define LAYOUT_ROW                                                                                 \
    {                                                                                              \
        "layout", 0, CLI_CHOICE, offsetof(struct convert_opts, layout),                            \
            "modelopt|compressed-tensors", "modelopt", 0, 0,                                       \
            "how NVFP4 is laid out in safetensors", NULL                                           \
    }
#define MODEL_DIR_ROW                                                                              \
    {                                                                                              \
        "model-dir", 0, CLI_STRING, offsetof(struct convert_opts, model_dir), "DIR", NULL, 0, 0,   \
            "config and tokenizer of SRC, if not beside it", NULL                                  \
    }
#define SHARD_ROW                                                                                  \
    {                                                                                              \
        "shard-mb", 0, CLI_INT, offsetof(struct convert_opts, shard_mb), "N", "5000", 1, 1000000,  \
            "directories: largest weights file in MB", NULL                                        \
    }

static const struct cli_opt convert_options[] = {
#define DTYPE_HELP "type of all weights; keep also leaves NVFP4 as it is"
    DTYPE_ROW,
#undef DTYPE_HELP
    LAYOUT_ROW,
    MODEL_DIR_ROW,
    SHARD_ROW,
};

static const struct cli_opt quantize_options[] = {
    {"method", 0, CLI_CHOICE, offsetof(struct convert_opts, method), "rtn|4over6|sweep", "sweep", 0,
     0, "how block scales are chosen", NULL},
    {"skip", 0, CLI_LIST, offsetof(struct convert_opts, skip), "PATTERN", NULL, 0, 0,
     "leave matching tensors as they are; * and ? match (repeatable)", NULL},
    {"two-level", 0, CLI_FLAG, offsetof(struct convert_opts, two_level), NULL, NULL, 0, 0,
     "store a tensor scale too: better for small weights", NULL},
    {"report", 0, CLI_STRING, offsetof(struct convert_opts, report), "FILE.json", NULL, 0, 0,
     "write the error figures there", NULL},
#define DTYPE_HELP "type of what is not quantised"
    DTYPE_ROW,
    LAYOUT_ROW,
    MODEL_DIR_ROW,
    SHARD_ROW,
};

static struct nb_convert_opts library_opts(const struct convert_opts *o, struct nbi_progress *p)
{
    static const enum nb_out_dtype dtypes[] = {NB_OUT_KEEP, NB_OUT_F32, NB_OUT_F16, NB_OUT_BF16};
    return (struct nb_convert_opts){.src = o->common.positional[0],
                                    .dst = o->common.positional[1],
                                    .model_dir = o->model_dir,
                                    .dtype = dtypes[o->dtype],
                                    .layout = (enum nb_out_layout)o->layout,
                                    .shard_bytes = (uint64_t)o->shard_mb * 1000000,
                                    .threads = (int)o->common.threads,
                                    .progress = nbi_progress_update,
                                    .progress_ctx = p};
}

static int run_convert(void *opts)
{
    struct convert_opts *o = opts;
    struct nbi_progress p;
    cli_progress(&p, &o->common, "convert");
    struct nb_convert_opts to = library_opts(o, &p);
    double start = nbi_now();
    enum nb_status rc = nb_convert(&to);
    nbi_progress_end(&p);
    if (rc == NB_OK && o->common.json)
        return cli_print_json(
            json_pack("{s:s,s:s,s:f}", "src", to.src, "dst", to.dst, "seconds", nbi_now() - start));
    if (rc == NB_OK && !o->common.quiet)
        printf("wrote %s\n", to.dst);
    return cli_status(rc);
}

static json_t *family_json(const struct nb_quant_family *f)
{
    return json_pack("{s:s,s:I,s:I,s:f,s:f,s:f}", "family", f->name, "tensors",
                     (json_int_t)f->tensors, "values", (json_int_t)f->values, "snr_db", f->snr_db,
                     "rel_mse", f->rel_mse, "zeros", f->zeros);
}

static json_t *report_json(const struct convert_opts *o, const struct nb_quantize_report *r)
{
    static const char *const methods[] = {"rtn", "4over6", "sweep"};
    json_t *families = json_array();
    for (int i = 0; i < r->families; i++)
        json_array_append_new(families, family_json(&r->family[i]));
    return json_pack("{s:s,s:s,s:s,s:b,s:o,s:o,s:I,s:I,s:f,s:I}", "src", o->common.positional[0],
                     "dst", o->common.positional[1], "method", methods[o->method], "two_level",
                     o->two_level, "families", families, "total", family_json(&r->total),
                     "source_bytes", (json_int_t)r->source_bytes, "output_bytes",
                     (json_int_t)r->output_bytes, "seconds", r->seconds, "peak_rss",
                     (json_int_t)nbi_peak_rss());
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

static int run_quantize(void *opts)
{
    struct convert_opts *o = opts;
    struct nbi_progress p;
    struct nb_quantize_report report;
    cli_progress(&p, &o->common, "quantize");
    struct nb_quantize_opts q = {.to = library_opts(o, &p),
                                 .method = (enum nb_quant_method)o->method,
                                 .two_level = o->two_level,
                                 .skip = o->skip.items};
    enum nb_status rc = nb_quantize(&q, &report);
    nbi_progress_end(&p);
    if (rc == NB_OK && o->report) {
        json_t *json = report_json(o, &report);
        rc = json ? nbi_json_write_file(json, o->report) : NB_ENOMEM;
        json_decref(json);
    }
    if (rc != NB_OK)
        return cli_status(rc);
    if (o->common.json)
        return cli_print_json(report_json(o, &report));
    if (!o->common.quiet)
        print_report(o, &report);
    return 0;
}

const struct cli_command cli_convert = {
    .name = "convert",
    .group = "files",
    .positional = "SRC DST",
    .summary = "turn any readable model into any writable one",
    .text =
        "Reads a model directory, .dat, .safetensors or .gguf and writes DST, whose ending says\n"
        "what: .dat, .safetensors, .gguf, anything else a model directory. Tensors stay bit for\n"
        "bit what they are, NVFP4 included, unless --dtype asks for another type. DST appears\n"
        "only when it is complete.",
    .examples = "  nibble convert Qwen3-4B model.gguf\n"
                "  nibble convert weights.dat Qwen3-4B-nvfp4 --model-dir Qwen3-4B "
                "--layout compressed-tensors\n",
    .options = convert_options,
    .option_count = sizeof convert_options / sizeof *convert_options,
    .opts_size = sizeof(struct convert_opts),
    .run = run_convert,
};

const struct cli_command cli_quantize = {
    .name = "quantize",
    .group = "files",
    .positional = "SRC DST",
    .summary = "turn the projections of a model into NVFP4",
    .text =
        "Quantises every projection (q, k, v, o, gate, up, down) and the head to NVFP4 and\n"
        "writes DST as convert does; embedding and norms stay as they are. A head that was\n"
        "tied to the embedding gets quantised values of its own; --skip lm_head keeps it tied,\n"
        "for programs that cannot read a quantised head. Prints, per family of tensors, the\n"
        "signal-to-noise ratio, the relative squared error and the share of zeros.",
    .examples = "  nibble quantize Qwen3-4B Qwen3-4B-nvfp4.dat\n"
                "  nibble quantize Qwen3-4B Qwen3-4B-nvfp4 --two-level --skip lm_head "
                "--skip '*.layers.0.*'\n",
    .options = quantize_options,
    .option_count = sizeof quantize_options / sizeof *quantize_options,
    .opts_size = sizeof(struct convert_opts),
    .run = run_quantize,
};
