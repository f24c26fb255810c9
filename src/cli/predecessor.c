/* predecessor.c - the table of the predecessor's options. */
#include "cli/predecessor.h"

#include <stdio.h>
#include <string.h>

#define RUN      "generate|chat"
#define TRAIN    "train|plan"
#define LEARN    "train|plan|whoami"
#define BOOLEAN  "true|false"
#define OFFLOADS "offload-mv-to-cpu|offload-w-to-cpu|offload-grad-to-cpu"

/* Rows with the same name are tried in order; the first that has the value counts. For a value that
 * none has, an option of ours by that name gets it as it is. */
static const struct cli_former rows[] = {
    /* ---- run-training*.fsx, run2.fsx, check-stageE.fsx ---- */
    {RUN, "topp", NULL, CLI_FORMER_OPTION, "top-p", NULL},
    {RUN, "path", NULL, CLI_FORMER_OPTION, "model-dir", NULL},
    {RUN, "dtype", "float32=true|fp32=true", CLI_FORMER_OPTION, "exact", NULL},
    {RUN, "dtype", "float16|fp16|half|bfloat16|bf16", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "quant", "fp4|nvfp4|none", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "quant", NULL, CLI_FORMER_REFUSED, NULL,
     "weights run as they are stored; 'nibble quantize' makes NVFP4"},
    {RUN, "mode", "bridge|run-training2|fp2|fp2-model|run-training-fp2", CLI_FORMER_ACCEPTED, NULL,
     NULL},
    {RUN, "kvc-backend", "fp2-model", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "kvc-backend", NULL, CLI_FORMER_REFUSED, NULL,
     "there is one forward pass; 'nibble parity' compares its paths"},
    {RUN, "KVCacheOut|kv-cache-out|kvcacheout", "true", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "KVCacheOut|kv-cache-out|kvcacheout", "false", CLI_FORMER_ACCEPTED, NULL,
     "the prompt fills a cache all the same; --kv-mode none runs without one"},
    {RUN, "use-kvc", "true", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "use-kvc", "false=none", CLI_FORMER_OPTION, "kv-mode", NULL},
    {RUN, "TokenByTokenOrPromptByPrompt|kvc-input-mode", "pbp=prompt|tbt=token", CLI_FORMER_OPTION,
     "kv-mode", NULL},
    {RUN, "NoKVComputeMode|no-kvc-mode",
     "ephemeral-kvc=prompt|ephemeral=prompt|kvc=prompt|ephemeral-kvc-tbt=token|"
     "ephemeral-tbt=token|full-replay=none|replay=none|none",
     CLI_FORMER_OPTION, "kv-mode", NULL},
    {RUN, "empty-cache-each-turn", BOOLEAN, CLI_FORMER_ACCEPTED, NULL, NULL},
    {"generate", "stop-here", BOOLEAN, CLI_FORMER_ACCEPTED, NULL, NULL},
    {"chat", "stop-here", "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {"chat", "stop-here", "true", CLI_FORMER_REFUSED, NULL,
     "'nibble generate' stops after one answer"},
    {"generate", "ifInteractive", "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {"generate", "ifInteractive", "true", CLI_FORMER_REFUSED, NULL,
     "'nibble chat' is interactive, and takes the same options"},
    {"chat", "ifInteractive", "true", CLI_FORMER_ACCEPTED, NULL, NULL},
    {"chat", "ifInteractive", "false", CLI_FORMER_REFUSED, NULL,
     "'nibble generate' gives one answer; 'nibble chat' reads messages from standard input"},
    {RUN, "interactive-reset-history", "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "interactive-reset-history", "true", CLI_FORMER_REFUSED, NULL,
     "/reset in 'nibble chat' forgets the conversation"},
    {RUN, "turns", "1", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "turns|followup-prompt", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble chat' reads one message a line from standard input"},
    {"chat", "check-logits", "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {"chat", "check-logits", "true", CLI_FORMER_REFUSED, NULL,
     "'nibble generate' has --check-logits"},
    {RUN, "timeout-ms", NULL, CLI_FORMER_REFUSED, NULL,
     "put 'timeout SECONDS' in front; --max-tokens N limits an answer"},
    {"chat", "tee-object-chat-session-json|tee-object-chat-session.json", NULL, CLI_FORMER_OPTION,
     "log", NULL},
    {RUN, "tee-object-chat-session-json|tee-object-chat-session.json|tee-object-chat-session", NULL,
     CLI_FORMER_REFUSED, NULL, "'nibble chat --log FILE.jsonl' writes the conversation"},
    {RUN, "prompt-from-chat-session", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble chat --replay FILE' takes what its --log wrote"},
    {RUN, "HistoryMode", "tokens", CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "HistoryMode", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble chat' keeps tokens and messages; /save writes the messages"},
    {RUN, "debug-kvc|cuda-mem-report|q4-kernel|q4-cache|fp4-ab|fp4-scale-check", "false",
     CLI_FORMER_ACCEPTED, NULL, NULL},
    {RUN, "debug-kvc|cuda-mem-report", NULL, CLI_FORMER_REFUSED, NULL,
     "/stats in 'nibble chat' shows cache and memory"},
    {RUN, "q4-kernel|q4-cache", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble doctor' shows which kernels run; --device and --exact choose"},
    {RUN, "fp4-ab|fp4-ab-max-calls|fp4-ab-explosion-rel", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble parity -m MODEL' compares the kernels with the exact products"},
    {RUN, "fp4-scale-check", NULL, CLI_FORMER_REFUSED, NULL,
     "'nibble inspect --verify MODEL' checks the scales"},
    {RUN, "target-tokens|chunk-size|secret", NULL, CLI_FORMER_REFUSED, NULL,
     "write the long text to a file: --prompt-file FILE with --ctx N"},

    /* ---- dotnet run, Train.*.fsx, run-train-step-full-nvfp4.fsx ---- */
    {TRAIN, "weight", NULL, CLI_FORMER_OPTION, "model", NULL},
    {TRAIN, "tokenizer", NULL, CLI_FORMER_REFUSED, NULL,
     "--model-dir DIR says where config.json and tokenizer.json are"},
    {TRAIN, "synthetic", "true=tiny|false=none", CLI_FORMER_OPTION, "synthetic", NULL},
    {TRAIN, "in-features|out-features|max-layers", NULL, CLI_FORMER_ACCEPTED, NULL,
     "shapes are the model's; --synthetic SIZE and --config FILE have others"},
    {TRAIN, "steps-per-epoch", NULL, CLI_FORMER_OPTION, "steps",
     "taken as --steps, which counts all epochs together"},
    {TRAIN, "loss|loss-mode", "cross-entropy=ce|token-ce=ce|l1=scalar|scalar-l1=scalar",
     CLI_FORMER_OPTION, "loss", NULL},
    {LEARN, "master-dtype", "bfloat16=bf16|float32=f32|fp32=f32", CLI_FORMER_OPTION, "master-dtype",
     NULL},
    {LEARN, "master-dtype", "float16|fp16|half", CLI_FORMER_REFUSED, NULL,
     "small updates are lost in f16; --master-dtype takes bf16, rounded stochastically, and f32"},
    {LEARN, "compute-dtype|dtype", "bfloat16=bf16|float32=f32|fp32=f32", CLI_FORMER_OPTION,
     "compute-dtype", NULL},
    {LEARN, "compute-dtype|dtype", "float16=bf16|fp16=bf16|half=bf16", CLI_FORMER_OPTION,
     "compute-dtype", "taken as bf16, the 16-bit type of activations here"},
    {LEARN, "optimizer-state-mode", "fp4=nvfp4|8bit=int8|8-bit=int8", CLI_FORMER_OPTION,
     "optimizer-state-mode", NULL},
    {LEARN, "use-packed-optimizer", "true", CLI_FORMER_ACCEPTED, NULL, NULL},
    {LEARN, "use-packed-optimizer", "false=f32", CLI_FORMER_OPTION, "optimizer-state-mode", NULL},
    {TRAIN, "grad-ckpt-chunk", "0=none", CLI_FORMER_OPTION, "recompute", NULL},
    {TRAIN, "grad-ckpt-chunk", NULL, CLI_FORMER_REFUSED, NULL,
     "--recompute block keeps only what goes into each layer"},
    {LEARN, OFFLOADS, "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {LEARN, OFFLOADS, "true", CLI_FORMER_REFUSED, NULL,
     "everything stays on the device; --fit GIB finds settings that fit"},
    {LEARN,
     "step-flush-each-param|compact-each-step|compact-after-model-load|dispose-session-after-load|"
     "compute-grad-norm|materialize-from-packed",
     BOOLEAN, CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "print-tensor-byte-report|profile-vram|profile-train-step-vram", "false",
     CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "print-tensor-byte-report", "true", CLI_FORMER_ACCEPTED, NULL,
     "'nibble plan' shows memory by part"},
    {TRAIN, "profile-vram|profile-train-step-vram", "true", CLI_FORMER_ACCEPTED, NULL,
     "--vram-report FILE.json writes memory by phase"},
    {TRAIN, "stop-after", "none", CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "stop-after", NULL, CLI_FORMER_REFUSED, NULL,
     "a run ends after --steps N; --vram-report FILE.json has all phases"},
    {TRAIN, "use-kvc", "false", CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "use-kvc", "true", CLI_FORMER_REFUSED, NULL,
     "training has no cache; 'nibble parity -m MODEL' compares it with the cached paths"},
    {TRAIN, "strict-load|restrict-load", "true", CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "strict-load|restrict-load", "false", CLI_FORMER_REFUSED, NULL,
     "only a complete model is trained; 'nibble inspect --verify MODEL' says what is wrong with "
     "it"},
    {TRAIN, "sample-index", "0", CLI_FORMER_ACCEPTED, NULL, NULL},
    {TRAIN, "sample-index", NULL, CLI_FORMER_REFUSED, NULL,
     "put the line into a file of its own for --data"},
    {TRAIN, "log-every", NULL, CLI_FORMER_REFUSED, NULL, "--log FILE.jsonl has every step"},
    {TRAIN, "test-max-tokens", NULL, CLI_FORMER_REFUSED, NULL,
     "--test-prompts FILE asks the model before and after"},

    {"whoami",
     "train-data|loss|grad-clip|train-last-layers|step-chunk-rows|sample-mode|log-every|"
     "test-max-tokens",
     NULL, CLI_FORMER_REFUSED, NULL,
     "whoami makes its own data and asks the result; 'nibble train' takes --data"},

    /* ---- export_qwen3.py ---- */
    {"convert", "out", NULL, CLI_FORMER_ARGUMENT, NULL, NULL},
    {"convert|quantize", "dtype", "float16=f16|fp16=f16|bfloat16=bf16|float32=f32|fp32=f32",
     CLI_FORMER_OPTION, "dtype", NULL},
    {"convert", "quant", "none", CLI_FORMER_ACCEPTED, NULL, NULL},
    {"convert", "quant", NULL, CLI_FORMER_REFUSED, NULL, "'nibble quantize SRC DST' makes NVFP4"},
};

/* Whether "a|b=c" has the word; *ours: what is behind its equals sign, or NULL. */
static bool is_in(const char *list, const char *word, size_t len, const char **ours)
{
    for (const char *p = list; *p; p += *p == '|') {
        size_t n = strcspn(p, "|"), theirs = strcspn(p, "|=");
        if (theirs == len && memcmp(p, word, len) == 0) {
            *ours = theirs < n ? p + theirs + 1 : NULL;
            return true;
        }
        p += n;
    }
    return false;
}

static bool is_of(const struct cli_former *f, const char *command, const char *name, size_t len)
{
    const char *none;
    return is_in(f->commands, command, strlen(command), &none) && is_in(f->names, name, len, &none);
}

bool cli_former_has(const char *command, const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (is_of(&rows[i], command, name, len))
            return true;
    return false;
}

const struct cli_former *cli_former_find(const char *command, const char *name, size_t len,
                                         const char *value, const char **mapped, char buffer[32])
{
    *mapped = value;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct cli_former *f = &rows[i];
        const char *ours = NULL;
        if (!is_of(f, command, name, len) ||
            (f->values && !is_in(f->values, value, strlen(value), &ours)))
            continue;
        if (ours) {
            snprintf(buffer, 32, "%.*s", (int)strcspn(ours, "|"), ours);
            *mapped = buffer;
        }
        return f;
    }
    return NULL;
}

bool cli_former_ends_options(const char *command, const char *word)
{
    return strcmp(command, "guard") == 0 && strcmp(word, "script") == 0;
}
