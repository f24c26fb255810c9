/* cmd_bench.c - speed, next to what the machine can do. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/stats.h"
#include "base/str.h"
#include "cli/fit.h"
#include "cli/input.h"
#include "cli/model_options.h"

struct bench_opts {
    struct cli_common common;
    struct cli_run_opts run;
    const char *file, *config;
    int64_t depth, tokens, parallel, steps, seq_len, batch_size, grad_accum, last_layers;
    int synthetic, precision, compute, weight_store, master, state, grad, recompute;
    bool fused_step, head_slices, deterministic;
    double fit;
};

static const struct cli_opt options[] = {
    CLI_MODEL_OPTIONS(struct bench_opts, run),
    {"kv-dtype", 0, CLI_CHOICE, offsetof(struct bench_opts, run.kv_dtype), CLI_KV_DTYPES, "f16", 0,
     0, "decode, prefill: element type of the KV cache", NULL},
    {"exact", 0, CLI_FLAG, offsetof(struct bench_opts, run.exact), NULL, NULL, 0, 0,
     "decode, prefill: multiply f32 activations instead of 16-bit integers", NULL},
    {"synthetic", 0, CLI_CHOICE, offsetof(struct bench_opts, synthetic), CLI_SIZE_CHOICES, "none",
     0, 0, "decode, prefill, train: random weights of this size instead of a model", NULL},
    {"config", 0, CLI_STRING, offsetof(struct bench_opts, config), "FILE", NULL, 0, 0,
     "decode, prefill, train: random weights in the shapes of a config.json", NULL},
    {"depth", 0, CLI_INT, offsetof(struct bench_opts, depth), "N", "16", 1, 1 << 24,
     "decode: tokens already in the context", NULL},
    {"tokens", 'n', CLI_INT, offsetof(struct bench_opts, tokens), "N", "0", 0, 1 << 24,
     "decode, prefill: tokens per round (0: 32); length of the prompt (0: 512)", NULL},
    {"parallel", 0, CLI_INT, offsetof(struct bench_opts, parallel), "N", "0", 0, 4096,
     "decode: number of sequences decoded together in one batch (0: a single one, without a batch)",
     NULL},
    {"deterministic", 0, CLI_FLAG, offsetof(struct bench_opts, deterministic), NULL, NULL, 0, 0,
     "decode, with --parallel: results of a sequence do not depend on the others, bit for bit",
     NULL},
    {"file", 0, CLI_STRING, offsetof(struct bench_opts, file), "FILE", NULL, 0, 0,
     "tokenizer: text to encode", NULL},
    {"steps", 0, CLI_INT, offsetof(struct bench_opts, steps), "N", "5", 1, 1e6,
     "train: number of timed steps, after one warm-up step", NULL},
    {"seq-len", 0, CLI_INT, offsetof(struct bench_opts, seq_len), "N", "512", 2, 1 << 20,
     "train: tokens per row", NULL},
    {"batch-size", 0, CLI_INT, offsetof(struct bench_opts, batch_size), "N", "4", 1, 1 << 20,
     "train: rows per pass", NULL},
    {"grad-accum", 0, CLI_INT, offsetof(struct bench_opts, grad_accum), "N", "1", 1, 1 << 20,
     "train: passes per update", NULL},
    {"precision", 0, CLI_CHOICE, offsetof(struct bench_opts, precision),
     CLI_CHOICES(NB_PRECISION_LIST), "nvfp4", 0, 0,
     "train: type of the weights in the forward pass", NULL},
    {"compute-dtype", 0, CLI_CHOICE, offsetof(struct bench_opts, compute),
     CLI_CHOICES(NB_COMPUTE_LIST), "auto", 0, 0,
     "train: type of activations and products (auto: bf16 on a GPU, f32 on the CPU and with "
     "--precision f32)",
     NULL},
    {"weight-store", 0, CLI_CHOICE, offsetof(struct bench_opts, weight_store),
     CLI_CHOICES(NB_WEIGHT_STORE_LIST), "auto", 0, 0,
     "train: what is stored of NVFP4 weights besides their masters (auto: codes)", NULL},
    {"master-dtype", 0, CLI_CHOICE, offsetof(struct bench_opts, master), "auto|f32|bf16", "auto", 0,
     0, "train: type of the master weights (auto: f32 with --precision f32, else bf16)", NULL},
    {"optimizer-state-mode", 0, CLI_CHOICE, offsetof(struct bench_opts, state),
     CLI_CHOICES(NB_MOMENT_TYPE_LIST), "int8", 0, 0, "train: type of Adam's moments", NULL},
    {"grad-dtype", 0, CLI_CHOICE, offsetof(struct bench_opts, grad), "f32|bf16", "f32", 0, 0,
     "train: type of the gradients of the layers' matrices", NULL},
    {"recompute", 0, CLI_CHOICE, offsetof(struct bench_opts, recompute), "none|block", "none", 0, 0,
     "train: block: keep only the input of each layer, and recompute the rest", NULL},
    {"fused-step", 0, CLI_FLAG, offsetof(struct bench_opts, fused_step), NULL, NULL, 0, 0,
     "train: update during the backward pass", NULL},
    {"head-slices", 0, CLI_FLAG, offsetof(struct bench_opts, head_slices), NULL, NULL, 0, 0,
     "train: with --fused-step, compute the gradients of embedding and head 8192 rows at a time",
     NULL},
    {"fit", 0, CLI_FLOAT, offsetof(struct bench_opts, fit), "GIB", "0", 0, 1e6,
     "train: use the fastest settings that fit into GIB of memory, or a GPU of that size", NULL},
    {"train-last-layers", 0, CLI_INT, offsetof(struct bench_opts, last_layers), "N", "0", 0, 10000,
     "train: train only the last N layers (0: everything)", NULL},
};

/* ---- ops ---- */

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
    printf("%d thread%s; memory reads at %.1f GB/s\n\n", b->threads, nbi_plural(b->threads),
           b->read_gb_per_s);
    printf("%-16s  %-7s  %14s  %14s  %14s\n", "operation", "path", "GB/s per core",
           "Gvalues/s core", "share of reads");
    for (int i = 0; i < b->rows; i++)
        printf("%-16s  %-7s  %14.3f  %14.3f  %12.1f %%\n", b->row[i].op, b->row[i].path,
               b->row[i].gb_per_s_per_core, b->row[i].gvalues_per_s_per_core,
               100 * b->row[i].gb_per_s_per_core * b->threads / b->read_gb_per_s);
    printf("\nGB/s: bf16 source bytes for quantize, NVFP4 bytes for dequantize.\n");
}

static int run_ops(struct bench_opts *o)
{
    struct nb_bench_ops result;
    enum nb_status rc = nb_bench_codec(&result, (int)o->common.threads, NULL);
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

/* ---- tokenizer ---- */

#define RUNS 5

struct text_bench {
    double load[RUNS], encode[RUNS], decode[RUNS]; /* seconds */
    size_t bytes, lines, tokens;
};

/* Encodes the text line by line, and decodes each line again, timing both. */
static enum nb_status one_pass(struct nb_tokenizer *t, const struct nbi_str *text, double *encode,
                               double *decode, struct text_bench *b)
{
    const char *p = nbi_str_text(text), *end = p + text->len;
    *encode = *decode = 0;
    b->tokens = b->lines = 0;
    while (p < end) {
        const char *newline = memchr(p, '\n', (size_t)(end - p)),
                   *stop = newline ? newline + 1 : end;
        int32_t *ids;
        char *back;
        size_t count, len;
        double start = nbi_now();
        NBI_TRY(nb_tokenizer_encode(t, p, (size_t)(stop - p), true, &ids, &count));
        double middle = nbi_now();
        enum nb_status rc = nb_tokenizer_decode(t, ids, count, &back, &len, NULL);
        *decode += nbi_now() - middle;
        *encode += middle - start;
        free(ids);
        NBI_TRY(rc);
        free(back);
        b->tokens += count;
        b->lines++;
        p = stop;
    }
    return NB_OK;
}

static enum nb_status bench_text(struct bench_opts *o, struct text_bench *b)
{
    struct nb_tokenizer *t = NULL;
    struct nbi_str text = {0};
    enum nb_status rc = cli_read_all(o->file, &text);
    if (rc == NB_OK && text.len == 0)
        rc = nbi_fail(NB_EVALUE, "'%s' is empty", o->file);
    b->bytes = text.len;
    for (int i = 0; i < RUNS && rc == NB_OK; i++) {
        nb_tokenizer_close(t);
        double start = nbi_now();
        rc = nb_tokenizer_open(&t, o->run.model, o->run.model_dir);
        b->load[i] = nbi_now() - start;
    }
    for (int i = -1; i < RUNS && rc == NB_OK; i++) /* the first pass warms up */
        rc = one_pass(t, &text, &b->encode[i < 0 ? 0 : i], &b->decode[i < 0 ? 0 : i], b);
    nb_tokenizer_close(t);
    nbi_str_release(&text);
    return rc;
}

static int run_tokenizer(struct bench_opts *o)
{
    struct text_bench b = {0};
    if (!o->run.model || !o->file) {
        fprintf(stderr, "nibble bench: the tokenizer's needs -m MODEL and --file FILE\n");
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = bench_text(o, &b);
    if (rc != NB_OK)
        return cli_status(rc);
    double load = nbi_median(b.load, RUNS), encode = nbi_median(b.encode, RUNS),
           decode = nbi_median(b.decode, RUNS);
    double mb = (double)b.bytes / 1e6;
    if (o->common.json)
        return cli_print_json(json_pack("{s:f,s:f,s:f,s:I,s:I,s:I}", "load_ms", load * 1e3,
                                        "encode_mb_per_s", mb / encode, "decode_mb_per_s",
                                        mb / decode, "bytes", (json_int_t)b.bytes, "lines",
                                        (json_int_t)b.lines, "tokens", (json_int_t)b.tokens),
                              true);
    printf("load    %8.1f ms\nencode  %8.1f MB/s, %.2f M tokens/s\ndecode  %8.1f MB/s\n"
           "%zu bytes in %zu lines are %zu tokens; one thread, medians of %d\n",
           load * 1e3, mb / encode, (double)b.tokens / encode / 1e6, mb / decode, b.bytes, b.lines,
           b.tokens, RUNS);
    return 0;
}

/* ---- decode, prefill ---- */

static int print_prefill(const struct bench_opts *o, const struct nb_bench_run *b)
{
    double per_core = b->gmac_per_s / b->cores, share = per_core / b->peak_gmac_per_s;
    if (o->common.json)
        return cli_print_json(
            json_pack("{s:s,s:f,s:f,s:f,s:o,s:o,s:i}", "device", b->device, "tokens_per_s",
                      b->tokens_per_s, "gmac_per_s", b->gmac_per_s, "gmac_per_s_per_core", per_core,
                      "peak_gmac_per_s_per_core", cli_json_number(b->peak_gmac_per_s), "share",
                      cli_json_number(share), "threads", b->threads),
            true);
    printf("prefill: %.1f tok/s, %.1f GMAC/s", b->tokens_per_s, b->gmac_per_s);
    if (strcmp(b->device, "cpu") == 0)
        printf(", %.1f per core, %.0f %% of the %.1f that a core can do from its cache "
               "(%d threads)\n",
               per_core, 100 * share, b->peak_gmac_per_s, b->threads);
    else if (isfinite(share))
        printf(", %.0f %% of the %.1f that it can do (%s)\n", 100 * share, b->peak_gmac_per_s,
               b->device);
    else
        printf(" (%s)\n", b->device);
    return 0;
}

static int print_decode(const struct bench_opts *o, const struct nb_bench_run *b)
{
    double share = b->gb_per_s / b->read_gb_per_s;
    int64_t batch = o->parallel > 0 ? o->parallel : 1;
    if (o->common.json)
        return cli_print_json(
            json_pack("{s:s,s:f,s:f,s:I,s:I,s:f,s:o,s:o,s:I,s:I,s:i}", "device", b->device,
                      "tokens_per_s", b->tokens_per_s, "tokens_per_s_per_sequence",
                      b->tokens_per_s / (double)batch, "bytes_per_token",
                      (json_int_t)b->bytes_per_token, "kv_bytes_per_token",
                      (json_int_t)b->kv_bytes_per_token, "gb_per_s", b->gb_per_s, "read_gb_per_s",
                      cli_json_number(b->read_gb_per_s), "share", cli_json_number(share), "context",
                      (json_int_t)o->depth, "batch", (json_int_t)batch, "threads", b->threads),
            true);
    printf("decode: %.1f tok/s", b->tokens_per_s);
    if (o->parallel > 0)
        printf(" in all, %.1f for each of %lld sequence%s, %.2f GB/s of weights, keys and values",
               b->tokens_per_s / (double)batch, (long long)batch, batch == 1 ? "" : "s",
               b->gb_per_s);
    else
        printf(", %.2f GB/s of weights", b->gb_per_s);
    printf(", %.0f %% of the %.2f GB/s that memory gives ", 100 * share, b->read_gb_per_s);
    if (strcmp(b->device, "cpu") == 0)
        printf("(%d threads)\n", b->threads);
    else
        printf("(%s)\n", b->device);
    return 0;
}

static int run_model(struct bench_opts *o, bool prefill)
{
    struct nb_engine *engine = NULL;
    struct nb_bench_run result;
    char device[NB_DEVICE_NAME];
    const struct nb_engine_opts opts = {.model = o->run.model,
                                        .model_dir = o->run.model_dir,
                                        .synthetic = cli_size(o->synthetic),
                                        .config = o->config,
                                        .device = cli_device(device, &o->common),
                                        .simd = cli_simd(o->run.simd),
                                        .threads = (int)o->common.threads};
    const struct nb_bench_run_opts to = {.prefill = prefill,
                                         .context = prefill ? 0 : o->depth,
                                         .tokens = o->tokens ? o->tokens
                                                   : prefill ? 512
                                                             : 32,
                                         .parallel = prefill ? 0 : o->parallel,
                                         .kv = (enum nb_kv_dtype)o->run.kv_dtype,
                                         .exact = o->run.exact,
                                         .deterministic = o->deterministic};
    enum nb_status rc = nb_engine_open(&engine, &opts);
    if (rc == NB_OK)
        rc = nb_bench_run(engine, &to, &result);
    nb_engine_close(engine);
    if (rc != NB_OK)
        return cli_status(rc);
    return prefill ? print_prefill(o, &result) : print_decode(o, &result);
}

/* ---- train ---- */

static int print_train(const struct bench_opts *o, const struct nb_bench_train *b)
{
    static const char *const computes[] = {NB_COMPUTE_LIST(NB_ENUM_NAME)};
    double share = b->flops_per_s / b->peak_flops_per_s;
    char bytes[32], peak[80];
    if (o->common.json)
        return cli_print_json(
            json_pack("{s:s,s:f,s:f,s:f,s:f,s:I,s:f,s:i,s:s}", "device", b->device, "tokens_per_s",
                      b->tokens_per_s, "tflops", b->flops_per_s / 1e12, "peak_tflops",
                      b->peak_flops_per_s / 1e12, "share", share, "peak_bytes",
                      (json_int_t)b->peak_bytes, "step_ms", b->step_seconds * 1e3, "threads",
                      b->threads, "compute_dtype", computes[b->plan.compute]),
            true);
    if (strcmp(b->device, "cpu") == 0)
        snprintf(peak, sizeof peak, "products of floats reach in the cache (%d threads)",
                 b->threads);
    else
        snprintf(peak, sizeof peak, "large products in bf16 reach (%s)", b->device);
    printf("train: %.1f tok/s, %.1f ms a step, %.1f GFLOP/s, %.0f %% of the %.1f that %s, %s\n",
           b->tokens_per_s, b->step_seconds * 1e3, b->flops_per_s / 1e9, 100 * share,
           b->peak_flops_per_s / 1e9, peak, nbi_format_bytes(bytes, (double)b->peak_bytes));
    return 0;
}

static int run_train(struct bench_opts *o)
{
    char device[NB_DEVICE_NAME];
    struct nb_bench_train result;
    struct nb_train_opts opts;
    nb_train_defaults(&opts);
    opts.model = o->run.model;
    opts.model_dir = o->run.model_dir;
    opts.synthetic = cli_size(o->synthetic);
    opts.config = o->config;
    opts.device = cli_device(device, &o->common);
    opts.seq_len = o->seq_len;
    opts.batch_size = o->batch_size;
    opts.grad_accum = o->grad_accum;
    opts.precision = (enum nb_precision)o->precision;
    opts.compute = (enum nb_compute)o->compute;
    opts.weight_store = (enum nb_weight_store)o->weight_store;
    opts.bf16_master = cli_bf16_master(o->master, o->precision);
    opts.moment_type = (enum nb_moment_type)o->state;
    opts.train_last_layers = o->last_layers;
    opts.bf16_gradients = o->grad == 1;
    opts.recompute = o->recompute == 1;
    opts.fused_step = o->fused_step;
    opts.head_slices = o->head_slices;
    opts.simd = cli_simd(o->run.simd);
    opts.threads = (int)o->common.threads;
    int code = cli_fit(&opts, o->fit, &cli_bench, &o->common);
    if (code != 0)
        return code;
    enum nb_status rc = nb_bench_train(&opts, o->steps, &result);
    return rc == NB_OK ? print_train(o, &result) : cli_status(rc);
}

static int run(void *opts)
{
    struct bench_opts *o = opts;
    const char *what = o->common.positional[0];
    bool decode = strcmp(what, "decode") == 0, prefill = strcmp(what, "prefill") == 0;
    bool train = strcmp(what, "train") == 0;
    int models = (o->run.model != NULL) + (o->synthetic > 0) + (o->config != NULL);
    if ((decode || prefill || train) && models != 1) {
        fprintf(stderr, "nibble bench: give -m MODEL, --synthetic SIZE or --config FILE\n");
        return CLI_EXIT_USAGE;
    }
    if (decode || prefill)
        return run_model(o, prefill);
    if (train)
        return run_train(o);
    char name[64]; /* as for a command that is for the CPU only */
    snprintf(name, sizeof name, "bench %.40s", what);
    int code = cli_cpu_only(&o->common, name);
    if (code)
        return code;
    if (strcmp(what, "ops") == 0)
        return run_ops(o);
    return run_tokenizer(o);
}

const struct cli_command cli_bench = {
    .name = "bench",
    .group = "measure",
    .positional = "WHAT",
    .what = "decode|prefill|train|ops|tokenizer",
    .summary = "measure speed, next to what the machine allows",
    .text = "decode, prefill: generation token by token, and whole prompts, compared with the\n"
            "measured memory bandwidth and arithmetic of the device; a GPU counts as one core.\n"
            "With --parallel, the weights are read once for a token of every sequence, and the KV\n"
            "cache counts too.\n"
            "\n"
            "train: steps over random tokens, compared with f32 matrix products (on a GPU, with\n"
            "bf16 ones). Additions and multiplications count as one operation each; what\n"
            "--recompute computes again is not counted.\n"
            "\n"
            "ops: the NVFP4 codec on every code path of this CPU, in GB/s per core with all\n"
            "threads busy, and the read bandwidth of the machine, measured in the same run. Runs\n"
            "on the CPU.\n"
            "\n"
            "tokenizer: loading the tokenizer of MODEL, and encoding and decoding FILE line by\n"
            "line on one thread. Runs on the CPU.",
    .examples = "  nibble bench decode --synthetic 0.6b\n"
                "  nibble bench decode --synthetic 4b --depth 32768 --kv-dtype f8 --device cuda\n"
                "  nibble bench decode --synthetic 4b --parallel 32 --depth 1024 --device cuda\n"
                "  nibble bench train --synthetic 0.6b\n  nibble bench ops\n  nibble bench ops "
                "--threads 1 --json\n"
                "  nibble bench tokenizer -m Qwen3-4B --file text.txt\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct bench_opts),
    .any_device = true,
    .run = run,
};
