/* cmd_inspect.c - lists a model file, and verifies it. */
#include <string.h>

#include "base/str.h"
#include "cli/cli.h"

struct inspect_opts {
    struct cli_common common;
    const char *model, *model_dir;
    bool verify;
};

static const struct cli_opt options[] = {
    {"model", 'm', CLI_STRING, offsetof(struct inspect_opts, model), "PATH", NULL, 0, 0,
     "the same as FILE", "weight"},
    {"verify", 0, CLI_FLAG, offsetof(struct inspect_opts, verify), NULL, NULL, 0, 0,
     "check names and shapes against the config, and every value", NULL},
    {"model-dir", 0, CLI_STRING, offsetof(struct inspect_opts, model_dir), "DIR", NULL, 0, 0,
     "directory of config.json, if it is not with FILE", NULL},
};

struct totals {
    const char *dtype;
    int64_t tensors;
    uint64_t bytes;
};

/* Sums by type, in order of appearance; there are fewer types than rows. */
static int sum_types(const struct nb_file *f, int64_t tensors, struct totals rows[32])
{
    int n = 0;
    for (int64_t i = 0; i < tensors; i++) {
        struct nb_tensor_info t;
        nb_file_tensor(f, i, &t);
        int k = 0;
        while (k < n && strcmp(rows[k].dtype, t.dtype) != 0)
            k++;
        if (k == n)
            rows[n++] = (struct totals){.dtype = t.dtype};
        rows[k].tensors++;
        rows[k].bytes += t.bytes;
    }
    return n;
}

static void shape_text(char *buf, size_t size, const struct nb_tensor_info *t)
{
    size_t used = (size_t)snprintf(buf, size, "[");
    for (int i = 0; i < t->ndim && used < size; i++)
        used += (size_t)snprintf(buf + used, size - used, "%s%lld", i ? ", " : "",
                                 (long long)t->shape[i]);
    if (used < size)
        snprintf(buf + used, size - used, "]");
}

static void print_text(const struct nb_file *f, const struct inspect_opts *o)
{
    char size[32];
    struct nb_file_info info;
    nb_file_info(f, &info);
    printf("%s: %s, %lld tensor%s, %s", o->common.positional[0], info.format,
           (long long)info.tensors, nbi_plural(info.tensors),
           nbi_format_bytes(size, (double)info.bytes));
    printf(strcmp(info.layout, "none") == 0 ? "\n" : ", NVFP4 laid out as %s\n", info.layout);
    for (int64_t i = 0; i < info.metadata; i++) {
        const char *key, *value;
        nb_file_meta(f, i, &key, &value);
        printf("  %s = %s\n", key, value);
    }
    int width = 4;
    for (int64_t i = 0; i < info.tensors; i++) {
        struct nb_tensor_info t;
        nb_file_tensor(f, i, &t);
        int len = (int)strlen(t.name);
        width = len > width && len < 80 ? len : width;
    }
    printf("\n%-*s  %-6s  %-18s  %12s  %14s\n", width, "name", "dtype", "shape", "bytes", "offset");
    for (int64_t i = 0; i < info.tensors; i++) {
        struct nb_tensor_info t;
        char shape[200];
        nb_file_tensor(f, i, &t);
        shape_text(shape, sizeof shape, &t);
        printf("%-*s  %-6s  %-18s  %12llu  %14llu", width, t.name, t.dtype, shape,
               (unsigned long long)t.bytes, (unsigned long long)t.offset);
        if (t.scaling && t.tensor_scale != 1.0f)
            printf("  x %g", (double)t.tensor_scale);
        printf("\n");
    }
    struct totals rows[32];
    int types = sum_types(f, info.tensors, rows);
    printf("\n");
    for (int i = 0; i < types; i++)
        printf("%s: %lld tensor%s, %s\n", rows[i].dtype, (long long)rows[i].tensors,
               nbi_plural(rows[i].tensors), nbi_format_bytes(size, (double)rows[i].bytes));
    if (o->verify)
        printf("verified: names, shapes, scales and values are valid\n");
}

static json_t *tensor_json(const struct nb_tensor_info *t, bool *ok)
{
    json_t *shape = json_array();
    for (int i = 0; i < t->ndim; i++)
        nbi_json_append(shape, json_integer(t->shape[i]), ok);
    json_t *row = json_pack("{s:s,s:s,s:o,s:I,s:I,s:o}", "name", t->name, "dtype", t->dtype,
                            "shape", shape, "bytes", (json_int_t)t->bytes, "offset",
                            (json_int_t)t->offset, "file", cli_json_path(t->file));
    if (t->scaling) {
        nbi_json_set(row, "scale_dtype", json_string(t->scaling), ok);
        nbi_json_set(row, "tensor_scale", json_real((double)t->tensor_scale), ok);
    }
    return row;
}

static json_t *file_json(const struct nb_file *f, const struct inspect_opts *o, bool *ok)
{
    json_t *tensors = json_array(), *meta = json_object(), *types = json_object();
    struct totals rows[32];
    struct nb_file_info info;
    nb_file_info(f, &info);
    int n = sum_types(f, info.tensors, rows);
    for (int64_t i = 0; i < info.tensors; i++) {
        struct nb_tensor_info t;
        nb_file_tensor(f, i, &t);
        nbi_json_append(tensors, tensor_json(&t, ok), ok);
    }
    for (int64_t i = 0; i < info.metadata; i++) {
        const char *key, *value;
        nb_file_meta(f, i, &key, &value);
        nbi_json_set(meta, key, json_string(value), ok);
    }
    for (int i = 0; i < n; i++)
        nbi_json_set(types, rows[i].dtype,
                     json_pack("{s:I,s:I}", "tensors", (json_int_t)rows[i].tensors, "bytes",
                               (json_int_t)rows[i].bytes),
                     ok);
    return json_pack("{s:s,s:s,s:I,s:o,s:o,s:o,s:b}", "format", info.format, "layout", info.layout,
                     "bytes", (json_int_t)info.bytes, "metadata", meta, "totals", types, "tensors",
                     tensors, "verified", o->verify);
}

static int run(void *opts)
{
    struct inspect_opts *o = opts;
    struct nb_file *f = NULL;
    enum nb_status rc = nb_file_open(&f, o->common.positional[0], o->model_dir);
    if (rc == NB_OK && o->verify) {
        struct cli_progress p;
        cli_progress_start(&p, &o->common, "verify");
        rc = nb_file_verify(f, (int)o->common.threads, cli_progress_update, &p, NULL);
        cli_progress_end(&p);
        if (rc != NB_OK && rc != NB_EINTERRUPTED) {
            fprintf(stderr, "nibble: '%s' is not valid: %s\n", o->common.positional[0],
                    nb_last_error());
            nb_file_close(f);
            return CLI_EXIT_FAILED;
        }
    }
    int code = cli_status(rc);
    if (code == 0 && o->common.json) {
        bool ok = true;
        json_t *json = file_json(f, o, &ok);
        code = cli_print_json(json, ok);
    } else if (code == 0) {
        print_text(f, o);
    }
    nb_file_close(f);
    return code;
}

const struct cli_command cli_inspect = {
    .name = "inspect",
    .group = "convert",
    .positional = "FILE",
    .summary = "list the contents of a model file, and check them",
    .text = "Lists the tensors of a .dat, .safetensors or .gguf file or of a model directory:\n"
            "name, type, shape, bytes and offset. An NVFP4 weight is one row. With --verify it\n"
            "also checks every name and shape against the config and reads every value: scales\n"
            "must be finite and positive, and no value may be NaN or infinite. If a check fails,\n"
            "the first problem is printed and the exit code is 1.",
    .examples = "  nibble inspect model.gguf\n"
                "  nibble inspect weights.dat --verify --model-dir Qwen3-4B\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct inspect_opts),
    .model_at = offsetof(struct inspect_opts, model),
    .run = run,
};
