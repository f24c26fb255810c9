/* cmd_doctor.c - what this machine has, which code paths run on it, and what is wrong. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <gnu/libc-version.h>
#include <pcre2.h>
#include <string.h>
#include <utf8proc.h>

#include "base/status.h"
#include "base/str.h"
#include "base/sys.h"
#include "cli/doctor_kernels.h"
#include "cli/model_options.h"

#define MAX_GPUS     16
#define MAX_PROBLEMS 16

struct doctor_opts {
    struct cli_common common;
    bool kernels;
    const char *only;
    int64_t elements;
    int simd;
};

static const struct cli_opt options[] = {
    {"kernels", 0, CLI_FLAG, offsetof(struct doctor_opts, kernels), NULL, NULL, 0, 0,
     "compare every operation of the device with the scalar CPU code", NULL},
    {"only", 0, CLI_STRING, offsetof(struct doctor_opts, only), "TEXT", NULL, 0, 0,
     "kernels: only operations with TEXT in the first two columns of their line", NULL},
    {"elements", 0, CLI_INT, offsetof(struct doctor_opts, elements), "N", "0", 0, 1 << 30,
     "kernels: size of the optimizer's tensors (0: small)", NULL},
    {"simd", 0, CLI_CHOICE, offsetof(struct doctor_opts, simd), "best" CLI_SIMD_CHOICES, "best", 0,
     0, "kernels: CPU instruction set", NULL},
};

struct problem {
    bool fatal; /* something needed is broken */
    char text[512];
};

struct findings {
    struct nbi_sys_info sys;
    struct nb_gpu_info gpus[MAX_GPUS];
    bool gpu_works[MAX_GPUS];
    struct nb_gpu_products gpu_products[MAX_GPUS]; /* no words: not known */
    int gpu_count;
    char device[NB_DEVICE_NAME];                                       /* what auto picks */
    char cpu_caps[NB_DEVICE_CAPS], gpu_caps[MAX_GPUS][NB_DEVICE_CAPS]; /* empty: not known */
    struct problem problems[MAX_PROBLEMS];
    int problem_count;
};

static void add_problem(struct findings *f, bool fatal, const char *text)
{
    if (f->problem_count == MAX_PROBLEMS)
        return;
    f->problems[f->problem_count].fatal = fatal;
    snprintf(f->problems[f->problem_count++].text, sizeof f->problems->text, "%s", text);
}

/* A failed check is a problem of this machine, unless there was no memory for it. */
static enum nb_status note(struct findings *f, bool fatal, enum nb_status rc)
{
    if (rc == NB_ENOMEM)
        return rc;
    if (rc != NB_OK)
        add_problem(f, fatal, nb_last_error());
    return NB_OK;
}

static void examine_gpu(struct findings *f, int i)
{
    char device[NB_DEVICE_NAME];
    snprintf(device, sizeof device, "cuda:%d", i);
    f->gpu_works[i] = nb_gpu_check(i) == NB_OK;
    if (!f->gpu_works[i])
        add_problem(f, nb_cuda_archs() != NULL, nb_last_error());
    else if (nb_gpu_products(i, &f->gpu_products[i]) != NB_OK ||
             nb_device_caps(device, f->gpu_caps[i]) != NB_OK)
        add_problem(f, false, nb_last_error());
    else if (f->gpu_products[i].failed) {
        char text[sizeof f->problems->text];
        snprintf(text, sizeof text, "GPU %d: %s; a newer driver or cuBLAS may help", i,
                 f->gpu_products[i].words);
        add_problem(f, false, text);
    }
}

static enum nb_status examine(struct findings *f)
{
    memset(f, 0, sizeof *f);
    nbi_sys_info(&f->sys);
    f->gpu_count = nb_gpu_list(f->gpus, MAX_GPUS);
    nb_device_auto(f->device);
    NBI_TRY(note(f, true, nb_codec_selftest()));
    NBI_TRY(note(f, true, nb_device_caps("cpu", f->cpu_caps)));
    for (int i = 0; i < f->gpu_count; i++)
        examine_gpu(f, i);
    if (f->gpu_count == 0 && nb_cuda_archs())
        add_problem(f, false,
                    "this build has CUDA, but the NVIDIA driver reports no GPU; install "
                    "the driver (nvidia-smi must work), or ignore this and use the CPU");
    if (nbi_simd_level() == NBI_SIMD_SCALAR)
        add_problem(f, false, "this CPU has neither AVX2 nor AVX-512; everything works, slowly");
    if (f->sys.memory_available && f->sys.memory_available < (uint64_t)1 << 30)
        add_problem(f, false,
                    "less than 1 GiB of memory is free; close other programs before "
                    "working on large models");
    return NB_OK;
}

/* The code path of each kind of operation. */
#define PATHS 3

struct path {
    const char *operation, *path;
};

static void list_paths(struct path paths[PATHS])
{
    struct nb_cpu_info cpu;
    nb_cpu_info(&cpu);
    paths[0] = (struct path){"NVFP4 products of a model", cpu.products};
    paths[1] = (struct path){"NVFP4 quantise and dequantise", cpu.codec};
    paths[2] = (struct path){"type conversion", cpu.codec};
}

/* Libraries in use, with the versions they report. */
#define LIBRARIES 4

struct library {
    const char *name;
    char version[64];
};

static void list_libraries(struct library l[LIBRARIES])
{
    static const char *const names[LIBRARIES] = {"jansson", "pcre2", "utf8proc", "glibc"};
    char pcre2[64] = "unknown"; /* as "10.42 2022-12-11" */
    pcre2_config(PCRE2_CONFIG_VERSION, pcre2);
    pcre2[strcspn(pcre2, " ")] = 0;
    for (int i = 0; i < LIBRARIES; i++)
        l[i].name = names[i];
    snprintf(l[0].version, sizeof l->version, "%s", jansson_version_str());
    snprintf(l[1].version, sizeof l->version, "%s", pcre2);
    snprintf(l[2].version, sizeof l->version, "%s", utf8proc_version());
    snprintf(l[3].version, sizeof l->version, "%s", gnu_get_libc_version());
}

static int exit_code(const struct findings *f)
{
    for (int i = 0; i < f->problem_count; i++)
        if (f->problems[i].fatal)
            return CLI_EXIT_FAILED;
    return 0;
}

static void print_device(const struct findings *f)
{
    char gpu[128];
    if (strcmp(f->device, "cpu") != 0)
        printf("device    auto picks %s%s to run and train models; the rest is on the CPU\n",
               f->device, cli_gpu_name(gpu));
    else
        printf("device    auto picks the CPU: %s\n",
               nb_cuda_archs() ? "no GPU is usable" : "CUDA is not built in");
}

static void print_text(const struct findings *f)
{
    char a[32], b[32];
    const struct nbi_sys_info *s = &f->sys;
    printf("nibble    %s\n", nb_version());
    printf("system    %s\n", s->kernel);
    printf("cpu       %s; %d online, %d usable", s->cpu_model, s->cpus_online, s->cpus_usable);
    printf(s->cgroup_cpus > 0 ? " (cgroup limit %.2g)\n" : "\n", s->cgroup_cpus);
    printf("features  %s\n", s->features[0] ? s->features : "none of those nibble uses");
    printf("memory    %s, %s available", nbi_format_bytes(a, (double)s->memory_total),
           nbi_format_bytes(b, (double)s->memory_available));
    if (s->cgroup_memory)
        printf(" (cgroup limit %s)", nbi_format_bytes(a, (double)s->cgroup_memory));
    printf("\ncuda      %s%s\n", nb_cuda_archs() ? "built in for sm_" : "not built in",
           nb_cuda_archs() ? nb_cuda_archs() : "");
    for (int i = 0; i < f->gpu_count; i++)
        printf("gpu %d     %s, compute capability %d.%d, %s (%s free), driver %s: %s\n", i,
               f->gpus[i].name, f->gpus[i].cc_major, f->gpus[i].cc_minor,
               nbi_format_bytes(a, (double)f->gpus[i].memory_bytes),
               nbi_format_bytes(b, (double)f->gpus[i].memory_free), f->gpus[i].driver,
               f->gpu_works[i] ? "usable" : "not usable");
    if (f->gpu_count == 0)
        printf("gpu       none\n");
    print_device(f);
    struct library libraries[LIBRARIES];
    list_libraries(libraries);
    printf("library   ");
    for (int i = 0; i < LIBRARIES; i++)
        printf("%s%s %s", i ? ", " : "", libraries[i].name, libraries[i].version);
    struct path paths[PATHS];
    list_paths(paths);
    printf("\n\npaths\n");
    for (int i = 0; i < PATHS; i++)
        printf("  %-30s  %s\n", paths[i].operation, paths[i].path);
    for (int i = 0; i < f->gpu_count; i++) {
        char what[48];
        snprintf(what, sizeof what, "NVFP4 products, prompts, gpu %d", i);
        if (f->gpu_products[i].words[0])
            printf("  %-30s  %s\n", what, f->gpu_products[i].words);
    }
    printf("\ncapabilities\n  %-30s  %s\n", "cpu", f->cpu_caps);
    for (int i = 0; i < f->gpu_count; i++)
        if (f->gpu_caps[i][0])
            printf("  gpu %-26d  %s\n", i, f->gpu_caps[i]);
    printf("\n%s\n", f->problem_count ? "problems" : "no problems found");
    for (int i = 0; i < f->problem_count; i++)
        printf("  %s: %s\n", f->problems[i].fatal ? "broken" : "note", f->problems[i].text);
}

static json_t *gpu_json(const struct findings *f, int i)
{
    const struct nb_gpu_info *g = &f->gpus[i];
    const struct nb_gpu_products *p = &f->gpu_products[i];
    return json_pack("{s:s,s:i,s:i,s:I,s:I,s:s,s:b,s:o,s:b,s:s}", "name", g->name, "cc_major",
                     g->cc_major, "cc_minor", g->cc_minor, "memory_bytes",
                     (json_int_t)g->memory_bytes, "memory_free", (json_int_t)g->memory_free,
                     "driver", g->driver, "usable", f->gpu_works[i], "nvfp4_products",
                     p->words[0] ? json_string(p->words) : json_null(), "native_fp4", p->native,
                     "capabilities", f->gpu_caps[i]);
}

static json_t *findings_json(const struct findings *f, bool *ok)
{
    const struct nbi_sys_info *s = &f->sys;
    json_t *gpus = json_array(), *problems = json_array(), *ops = json_object(),
           *libraries = json_object();
    struct library list[LIBRARIES];
    struct path paths[PATHS];
    list_libraries(list);
    list_paths(paths);
    for (int i = 0; i < LIBRARIES; i++)
        nbi_json_set(libraries, list[i].name, json_string(list[i].version), ok);
    for (int i = 0; i < f->gpu_count; i++)
        nbi_json_append(gpus, gpu_json(f, i), ok);
    for (int i = 0; i < f->problem_count; i++)
        nbi_json_append(
            problems,
            json_pack("{s:b,s:s}", "fatal", f->problems[i].fatal, "text", f->problems[i].text), ok);
    for (int i = 0; i < PATHS; i++)
        nbi_json_set(ops, paths[i].operation, json_string(paths[i].path), ok);
    return json_pack(
        "{s:s,s:s,s:{s:s,s:s,s:i,s:i,s:f,s:s},s:{s:I,s:I,s:I},s:o,s:s,s:o,s:o,s:o,s:o}", "version",
        nb_version(), "system", s->kernel, "cpu", "model", s->cpu_model, "features", s->features,
        "online", s->cpus_online, "usable", s->cpus_usable, "cgroup_cpus", s->cgroup_cpus,
        "capabilities", f->cpu_caps, "memory", "total", (json_int_t)s->memory_total, "available",
        (json_int_t)s->memory_available, "cgroup_limit", (json_int_t)s->cgroup_memory, "cuda",
        nb_cuda_archs() ? json_string(nb_cuda_archs()) : json_null(), "device", f->device, "gpus",
        gpus, "libraries", libraries, "paths", ops, "problems", problems);
}

static int run(void *opts)
{
    struct doctor_opts *o = opts;
    struct findings f;
    if (o->kernels)
        return cli_doctor_kernels(
            &(struct cli_kernel_opts){&o->common, o->only, o->elements, cli_simd(o->simd)});
    enum nb_status status = examine(&f);
    if (status != NB_OK)
        return cli_status(status);
    if (o->common.json) {
        bool ok = true;
        json_t *json = findings_json(&f, &ok);
        int rc = cli_print_json(json, ok);
        return rc ? rc : exit_code(&f);
    }
    print_text(&f);
    return exit_code(&f);
}

const struct cli_command cli_doctor = {
    .name = "doctor",
    .group = "diagnose",
    .positional = "",
    .summary = "show what this machine has, and report problems",
    .text = "Shows CPU, memory, GPUs and libraries, the code path that each operation takes on\n"
            "this machine, the capabilities of each device, and a line for each problem with its\n"
            "remedy. Runs the self-test of the NVFP4 codec and, on GPUs with FP4 tensor cores,\n"
            "that of FP4 products. The exit code is 1 if something essential is broken.\n"
            "\n"
            "--kernels compares every operation of the device with the scalar CPU code, on small\n"
            "and odd shapes, and prints a line for each: the largest error, the limit, and\n"
            "whether it passed. The exit code is 1 if one did not. Include this output in a\n"
            "report of wrong results.",
    .examples = "  nibble doctor\n"
                "  nibble doctor --kernels\n"
                "  nibble doctor --kernels --device cuda --only adamw --elements 1000000\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct doctor_opts),
    .any_device = true,
    .run = run,
};
