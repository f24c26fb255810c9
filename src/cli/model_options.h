/* model_options.h - what the commands that run a model share: their options, opening the model. */
#pragma once

#include "base/sys.h"
#include "cli/cli.h"

/* The choices of --simd after its default. */
#define CLI_SIMD_CHOICE(id, name) "|" name
#define CLI_SIZE_CHOICES          "none" NB_PRESET_LIST(CLI_CHOICE_NAME)
#define CLI_SIMD_CHOICES          NBI_SIMD_LIST(CLI_SIMD_CHOICE)

struct cli_run_opts {
    const char *model, *model_dir;
    int64_t context;
    int simd, kv_dtype, kv_mode;
    bool exact;
};

#define CLI_MODEL_OPTIONS(type, member)                                                            \
    {"model",                                                                                      \
     'm',                                                                                          \
     CLI_STRING,                                                                                   \
     offsetof(type, member.model),                                                                 \
     "PATH",                                                                                       \
     NULL,                                                                                         \
     0,                                                                                            \
     0,                                                                                            \
     "model directory, .gguf file, or weights file (with --model-dir)",                            \
     "weight"},                                                                                    \
        {"model-dir",                                                                              \
         0,                                                                                        \
         CLI_STRING,                                                                               \
         offsetof(type, member.model_dir),                                                         \
         "DIR",                                                                                    \
         NULL,                                                                                     \
         0,                                                                                        \
         0,                                                                                        \
         "directory of config and tokenizer, if they are not with the model",                      \
         NULL},                                                                                    \
    {                                                                                              \
        "simd", 0, CLI_CHOICE, offsetof(type, member.simd), "best" CLI_SIMD_CHOICES, "best", 0, 0, \
            "CPU instruction set to use", NULL                                                     \
    }

#define CLI_KV_DTYPES "f32|f16|bf16|f8" /* in the order of enum nb_kv_dtype */

#define CLI_RUN_OPTIONS(type, member)                                                              \
    CLI_MODEL_OPTIONS(type, member),                                                               \
        {"ctx",                                                                                    \
         'c',                                                                                      \
         CLI_INT,                                                                                  \
         offsetof(type, member.context),                                                           \
         "N",                                                                                      \
         "0",                                                                                      \
         0,                                                                                        \
         1 << 30,                                                                                  \
         "maximum context in tokens (0: 4096, or less if the model's limit is lower)",             \
         "context"},                                                                               \
        {"kv-dtype", 0, CLI_CHOICE, offsetof(type, member.kv_dtype), CLI_KV_DTYPES,                \
         "f16",      0, 0,          "element type of the KV cache",  NULL},                        \
        {"kv-mode",                                                                                \
         0,                                                                                        \
         CLI_CHOICE,                                                                               \
         offsetof(type, member.kv_mode),                                                           \
         "prompt|token|none",                                                                      \
         "prompt",                                                                                 \
         0,                                                                                        \
         0,                                                                                        \
         "how the prompt is processed: whole, token by token, or all of it again for each token, " \
         "without a cache",                                                                        \
         NULL},                                                                                    \
    {                                                                                              \
        "exact", 0, CLI_FLAG, offsetof(type, member.exact), NULL, NULL, 0, 0,                      \
            "multiply f32 activations instead of 16-bit ones", NULL                                \
    }

/* The size that a choice of CLI_SIZE_CHOICES names; NULL: none. */
const char *cli_size(int choice);

/* The name that --simd selects; NULL: the default. */
const char *cli_simd(int choice);

/* Whether --master-dtype auto|f32|bf16 means bf16, given --precision. */
bool cli_bf16_master(int choice, int precision);

/* The device to run on, in `name`: --device, or what auto picks, which is printed on stderr if it
 * is a GPU. */
const char *cli_device(char name[NB_DEVICE_NAME], const struct cli_common *common);

/* " (NVIDIA H200)", or "" where the driver's list does not tell which GPU it is. */
const char *cli_gpu_name(char text[128]);

/* Opens the model on a device, with progress on stderr. */
enum nb_status cli_engine_open_on(struct nb_engine **out, const char *device,
                                  const struct cli_run_opts *o, const struct cli_common *common);

/* Opens it on the device that cli_device gives. */
enum nb_status cli_engine_open(struct nb_engine **out, const struct cli_run_opts *o,
                               const struct cli_common *common);
enum nb_status cli_session_open(struct nb_session **out, const struct nb_engine *engine,
                                const struct cli_run_opts *o);

/* ---- sampling ---- */

struct cli_sampling_opts {
    double temp, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    int64_t top_k, seed;
};

#define CLI_SAMPLING_OPTIONS(type, member)                                                         \
    {"temp",    't', CLI_FLOAT, offsetof(type, member.temp), "X",                                  \
     "model's", 0,   100,       "temperature; 0 is greedy",  "temperature"},                       \
        {"top-k",                                                                                  \
         0,                                                                                        \
         CLI_INT,                                                                                  \
         offsetof(type, member.top_k),                                                             \
         "N",                                                                                      \
         "model's",                                                                                \
         0,                                                                                        \
         1e9,                                                                                      \
         "keep the N most likely tokens; 0: all",                                                  \
         NULL},                                                                                    \
        {"top-p",                                                                                  \
         0,                                                                                        \
         CLI_FLOAT,                                                                                \
         offsetof(type, member.top_p),                                                             \
         "X",                                                                                      \
         "model's",                                                                                \
         1e-9,                                                                                     \
         1,                                                                                        \
         "keep the most likely tokens whose probabilities add up to X",                            \
         NULL},                                                                                    \
        {"min-p",                                                                                  \
         0,                                                                                        \
         CLI_FLOAT,                                                                                \
         offsetof(type, member.min_p),                                                             \
         "X",                                                                                      \
         "model's",                                                                                \
         0,                                                                                        \
         1,                                                                                        \
         "keep tokens at least X times as likely as the most likely one",                          \
         NULL},                                                                                    \
        {"repeat-penalty",                                                                         \
         0,                                                                                        \
         CLI_FLOAT,                                                                                \
         offsetof(type, member.repeat_penalty),                                                    \
         "X",                                                                                      \
         "model's",                                                                                \
         1e-3,                                                                                     \
         1000,                                                                                     \
         "divide the logits of tokens that have occurred by X",                                    \
         NULL},                                                                                    \
        {"presence-penalty",                                                                       \
         0,                                                                                        \
         CLI_FLOAT,                                                                                \
         offsetof(type, member.presence_penalty),                                                  \
         "X",                                                                                      \
         "0",                                                                                      \
         -100,                                                                                     \
         100,                                                                                      \
         "subtract X from the logits of tokens that have occurred",                                \
         NULL},                                                                                    \
        {"frequency-penalty",                                                                      \
         0,                                                                                        \
         CLI_FLOAT,                                                                                \
         offsetof(type, member.frequency_penalty),                                                 \
         "X",                                                                                      \
         "0",                                                                                      \
         -100,                                                                                     \
         100,                                                                                      \
         "subtract X from a token's logit for each time it has occurred",                          \
         NULL},                                                                                    \
    {                                                                                              \
        "seed", 0, CLI_INT, offsetof(type, member.seed), "N", "0", 0, 9e15,                        \
            "random seed; the same seed gives the same text", NULL                                 \
    }

/* "stop", "length", "context". */
const char *cli_finish_reason(enum nb_finish finish);

/* Tokens per second of the prompt's computed part, and of the answer after its first token; 0 if
 * there are none. */
double cli_prompt_speed(const struct nb_generate_result *r);
double cli_decode_speed(const struct nb_generate_result *r);
void cli_print_timing(const struct nb_generate_result *r); /* a line on stderr */

/* The model's settings, overridden by the options given. */
void cli_sampling(struct nb_sampling *out, const struct nb_engine *engine,
                  const struct cli_sampling_opts *o);
