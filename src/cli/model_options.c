/* model_options.c - opening models, and sampling settings. */
#include "cli/model_options.h"

#include <math.h>
#include <string.h>

#include "base/str.h"

const char *cli_size(int choice)
{
    static const char *const names[] = {NULL, NB_PRESET_LIST(NB_ENUM_NAME)};
    return names[choice];
}

const char *cli_simd(int choice)
{
    return choice > 0 ? nbi_simd_name((enum nbi_simd)(choice - 1)) : NULL;
}

bool cli_bf16_master(int choice, int precision)
{
    return choice == 0 ? precision != NB_PRECISION_F32 : choice == 2;
}

/* The driver lists GPUs in its own order and ignores CUDA_VISIBLE_DEVICES, so the name is certain
 * only if all GPUs have the same one. */
const char *cli_gpu_name(char text[128])
{
    struct nb_gpu_info gpus[64];
    int count = nb_gpu_list(gpus, 64);
    text[0] = 0;
    for (int i = 1; i < count; i++)
        if (strcmp(gpus[i].name, gpus[0].name) != 0)
            return text;
    if (count > 0)
        snprintf(text, 128, " (%s)", gpus[0].name);
    return text;
}

const char *cli_device(char name[NB_DEVICE_NAME], const struct cli_common *common)
{
    char gpu[128];
    bool picked = strcmp(common->device, "auto") == 0;
    if (picked)
        nb_device_auto(name);
    else
        snprintf(name, NB_DEVICE_NAME, "%s", common->device);
    if (strcmp(name, "cpu") != 0 && !common->quiet && (picked || common->verbose))
        fprintf(stderr, "nibble: on %s%s\n", name, cli_gpu_name(gpu));
    return name;
}

enum nb_status cli_engine_open_on(struct nb_engine **out, const char *device,
                                  const struct cli_run_opts *o, const struct cli_common *common)
{
    struct cli_progress progress;
    cli_progress_start(&progress, common, "loading");
    const struct nb_engine_opts opts = {.model = o->model,
                                        .model_dir = o->model_dir,
                                        .device = device,
                                        .simd = cli_simd(o->simd),
                                        .threads = (int)common->threads,
                                        .progress = cli_progress_update,
                                        .progress_ctx = &progress};
    enum nb_status rc = nb_engine_open(out, &opts);
    cli_progress_end(&progress);
    if (rc == NB_OK && common->verbose) {
        struct nb_engine_info info;
        nb_engine_info(*out, &info);
        fprintf(stderr, "nibble: on %s (%s%s), %d thread%s; %lld parameters, %.3f GB a token\n",
                info.device, strcmp(info.device, "cpu") == 0 ? "" : "host: ", info.simd,
                info.threads, nbi_plural(info.threads), (long long)info.parameters,
                (double)info.bytes_per_token / 1e9);
    }
    return rc;
}

enum nb_status cli_engine_open(struct nb_engine **out, const struct cli_run_opts *o,
                               const struct cli_common *common)
{
    char device[NB_DEVICE_NAME];
    return cli_engine_open_on(out, cli_device(device, common), o, common);
}

enum nb_status cli_session_open(struct nb_session **out, const struct nb_engine *engine,
                                const struct cli_run_opts *o)
{
    const struct nb_session_opts opts = {.context = o->context,
                                         .kv = (enum nb_kv_dtype)o->kv_dtype,
                                         .mode = (enum nb_kv_mode)o->kv_mode,
                                         .exact = o->exact};
    return nb_session_open(out, engine, &opts);
}

void cli_sampling(struct nb_sampling *out, const struct nb_engine *engine,
                  const struct cli_sampling_opts *o)
{
    struct nb_engine_info info;
    nb_engine_info(engine, &info);
    *out = info.sampling;
    if (!isnan(o->temp))
        out->temperature = o->temp;
    if (o->top_k >= 0)
        out->top_k = o->top_k;
    if (!isnan(o->top_p))
        out->top_p = o->top_p;
    if (!isnan(o->min_p))
        out->min_p = o->min_p;
    if (!isnan(o->repeat_penalty))
        out->repeat_penalty = o->repeat_penalty;
    out->presence_penalty = o->presence_penalty;
    out->frequency_penalty = o->frequency_penalty;
    out->seed = (uint64_t)o->seed;
}

/* ---- results ---- */

const char *cli_finish_reason(enum nb_finish finish)
{
    static const char *const reasons[] = {"stop", "length", "context"};
    return reasons[finish];
}

double cli_prompt_speed(const struct nb_generate_result *r)
{
    double computed = (double)(r->prompt_tokens - r->reused_tokens);
    return r->prompt_seconds > 0 ? computed / r->prompt_seconds : 0;
}

double cli_decode_speed(const struct nb_generate_result *r)
{
    return r->count > 1 && r->seconds > 0 ? (double)(r->count - 1) / r->seconds : 0;
}

void cli_print_timing(const struct nb_generate_result *r)
{
    fprintf(stderr,
            "prompt: %lld token%s in %.3f s (%.1f tok/s); answer: %zu token%s, %.1f tok/s\n",
            (long long)r->prompt_tokens, nbi_plural(r->prompt_tokens), r->prompt_seconds,
            cli_prompt_speed(r), r->count, nbi_plural((int64_t)r->count), cli_decode_speed(r));
}
