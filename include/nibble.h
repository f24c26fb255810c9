/* nibble.h - the one public header of libnibble.
 *
 * Every function that can fail returns enum nb_status; on failure nb_last_error() holds one line
 * that says what failed, on what and why. Nothing in the library prints, exits or aborts on bad
 * input. Strings are UTF-8; sizes and offsets are 64 bits wide. Unless a comment says otherwise,
 * functions may be called from several threads as long as each works on its own objects. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* libnibble.so has nothing else to call */

#define NB_MUST_CHECK __attribute__((warn_unused_result))
#define NB_MAX_DIMS   8

/* The lists below are macros with rows (enumerator, text). These two make the enum and an array of
 * the texts. */
#define NB_ENUMERATOR(id, name) id,
#define NB_ENUM_NAME(id, name)  name,

/* ---- status ---------------------------------------------------------------------------- */

#define NB_STATUS_LIST(X)                                                                          \
    X(NB_OK, "ok")                                                                                 \
    X(NB_EINVAL, "invalid argument")                                                               \
    X(NB_ENOMEM, "out of memory")                                                                  \
    X(NB_EIO, "input or output error")                                                             \
    X(NB_EFORMAT, "malformed file")                                                                \
    X(NB_EVALUE, "unusable value")                                                                 \
    X(NB_EUNSUPPORTED, "not supported")                                                            \
    X(NB_ENOTFOUND, "not found")                                                                   \
    X(NB_EDEVICE, "device error")                                                                  \
    X(NB_EINTERRUPTED, "interrupted")

enum nb_status { NB_STATUS_LIST(NB_ENUMERATOR) };

/* The name of a status in words, for example "malformed file". */
const char *nb_status_text(enum nb_status status);

/* The message of the last failure on this thread; valid until the next failure on it. */
const char *nb_last_error(void);

/* "MAJOR.MINOR.PATCH (commit)". */
const char *nb_version(void);

/* ---- logging, progress, interruption ------------------------------------------------------ */

enum nb_log_level { NB_LOG_ERROR, NB_LOG_WARN, NB_LOG_INFO, NB_LOG_DEBUG };

typedef void (*nb_log_fn)(void *ctx, enum nb_log_level level, const char *line);

/* Where log lines go, for the whole process; NULL drops them (the default). Call it before any
 * other thread uses the library; fn is called on the thread that logs. */
void nb_log_set_sink(nb_log_fn fn, void *ctx);

/* Called from time to time on the thread that runs a long operation; the unit is the operation's.
 */
typedef void (*nb_progress_fn)(void *ctx, uint64_t done, uint64_t total);

/* A wish to stop; zeroed at first. It is the caller's, and the library never clears it. Options
 * have a pointer to one (NULL: none): the operation ends with NB_EINTERRUPTED soon after it was
 * set, also on the threads that work for it, and so does one that begins while it is set. Any
 * number of operations may share one. Within a call, calls that have none of their own obey its. */
struct nb_cancel {
    int set;
};

void nb_cancel_set(struct nb_cancel *cancel); /* any thread, and signal handlers */
void nb_cancel_clear(struct nb_cancel *cancel);

/* ---- model files --------------------------------------------------------------------------- */

/* One tensor as a reader of the model sees it: the parts of a quantised weight are one row. */
struct nb_tensor_info {
    const char *name;  /* Hugging Face name */
    const char *dtype; /* "bf16", "nvfp4", ... */
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    uint64_t bytes;      /* all parts, as stored */
    uint64_t offset;     /* of the first part, from the start of its file */
    const char *file;    /* which file of the model holds it, without its directory */
    float tensor_scale;  /* NVFP4: the second-level scale; 1 where the file has none */
    const char *scaling; /* NVFP4: the stored type of the block scales; NULL otherwise */
};

struct nb_file;

/* Opens a model directory or one `.dat`, `.safetensors` or `.gguf` file and checks its structure.
 * config.json is looked for in model_dir (may be NULL), else next to the file; a model without
 * one opens too. */
NB_MUST_CHECK enum nb_status nb_file_open(struct nb_file **out, const char *path,
                                          const char *model_dir);
void nb_file_close(struct nb_file *file);

const char *nb_file_format(const struct nb_file *file); /* "dat", "safetensors", "gguf" */
const char *nb_file_layout(const struct nb_file *file); /* of NVFP4 tensors, or "none" */
int64_t nb_file_tensor_count(const struct nb_file *file);
void nb_file_tensor(const struct nb_file *file, int64_t index, struct nb_tensor_info *info);
uint64_t nb_file_bytes(const struct nb_file *file); /* on disk, all files */

/* Metadata rows as text, in file order; long values are shortened. Strings live as long as file. */
int64_t nb_file_meta_count(const struct nb_file *file);
void nb_file_meta(const struct nb_file *file, int64_t index, const char **key, const char **value);

/* Checks names and shapes against the config (without a config, as far as the shapes allow), then
 * every value: scales must be finite and positive, no value NaN or infinite. The message names the
 * first problem. threads: 0 for what this process may use. */
NB_MUST_CHECK enum nb_status nb_file_verify(struct nb_file *file, int threads,
                                            nb_progress_fn progress, void *progress_ctx,
                                            struct nb_cancel *cancel);

/* ---- conversion and quantisation ------------------------------------------------------------ */

enum nb_out_dtype { NB_OUT_KEEP, NB_OUT_F32, NB_OUT_F16, NB_OUT_BF16 };
enum nb_out_layout { NB_LAYOUT_KEEP, NB_LAYOUT_MODELOPT, NB_LAYOUT_COMPRESSED_TENSORS };
enum nb_quant_method { NB_QUANT_RTN, NB_QUANT_4OVER6, NB_QUANT_SWEEP };

struct nb_convert_opts {
    const char *src, *dst; /* dst: by its ending, else a directory */
    const char *model_dir; /* config and tokenizer of a bare weights file; may be NULL */
    enum nb_out_dtype dtype;
    enum nb_out_layout layout; /* NVFP4 in safetensors; keep: the source's, else ModelOpt */
    uint64_t shard_bytes;      /* directories: start a new file past this; 0: 5 GB */
    int threads;               /* 0: what this process may use */
    nb_progress_fn progress;   /* in bytes of the source; may be NULL */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* Streams tensor by tensor; memory does not grow with the model. dst is replaced only at the end,
 * in one step. */
NB_MUST_CHECK enum nb_status nb_convert(const struct nb_convert_opts *opts);

struct nb_quantize_opts {
    struct nb_convert_opts to; /* dtype applies to what is not quantised */
    enum nb_quant_method method;
    bool two_level;
    const char *const *skip; /* wildcard patterns over tensor names; NULL-terminated or NULL */
};

/* The error of one family of tensors, for example all q_proj, against its source. */
struct nb_quant_family {
    char name[32];
    int64_t tensors, values;
    double snr_db, rel_mse, zeros; /* snr_db: infinite without error; zeros: share that became 0 */
};

#define NB_QUANT_FAMILIES 16

struct nb_quantize_report {
    int families; /* rows in use */
    struct nb_quant_family family[NB_QUANT_FAMILIES];
    struct nb_quant_family total;
    uint64_t source_bytes, output_bytes;
    double seconds; /* wall time of the whole operation */
};

NB_MUST_CHECK enum nb_status nb_quantize(const struct nb_quantize_opts *opts,
                                         struct nb_quantize_report *report);

/* The shapes of Qwen3 models, and of one for tests. */
#define NB_PRESET_LIST(X)                                                                          \
    X(NB_PRESET_TINY, "tiny")                                                                      \
    X(NB_PRESET_0_6B, "0.6b")                                                                      \
    X(NB_PRESET_1_7B, "1.7b")                                                                      \
    X(NB_PRESET_4B, "4b")                                                                          \
    X(NB_PRESET_8B, "8b")                                                                          \
    X(NB_PRESET_14B, "14b")                                                                        \
    X(NB_PRESET_32B, "32b")

enum nb_preset { NB_PRESET_LIST(NB_ENUMERATOR) };

/* Random weights: preset is a name of the list, or config is the path of a config.json.
 * Deterministic for a seed, whatever the thread count. */
struct nb_synth_opts {
    const char *preset, *config; /* one of the two */
    const char *dst;             /* a directory */
    enum nb_out_dtype dtype;     /* NB_OUT_KEEP: bf16 */
    uint64_t seed;
    float sigma; /* of the normal distribution; 0: the config's initializer_range */
    int threads;
    nb_progress_fn progress; /* in bytes written */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

NB_MUST_CHECK enum nb_status nb_synth(const struct nb_synth_opts *opts);

/* ---- text ------------------------------------------------------------------------------------ */

struct nb_tokenizer;

/* From a model directory, a tokenizer.json, a `.gguf` file, or a weights file with model_dir (may
 * be NULL). Any number of threads may use a tokenizer at once. share hands it to another owner: it
 * lives until every owner has closed it. */
NB_MUST_CHECK enum nb_status nb_tokenizer_open(struct nb_tokenizer **out, const char *model,
                                               const char *model_dir);
NB_MUST_CHECK enum nb_status nb_tokenizer_share(struct nb_tokenizer **out,
                                                const struct nb_tokenizer *t);
void nb_tokenizer_close(struct nb_tokenizer *t);

int64_t nb_tokenizer_size(const struct nb_tokenizer *t); /* all ids are smaller */

/* The ids of a text; malformed UTF-8 counts as U+FFFD. special: special tokens in the text are
 * recognised. The caller frees *ids. */
NB_MUST_CHECK enum nb_status nb_tokenizer_encode(struct nb_tokenizer *t, const char *text,
                                                 size_t len, bool special, int32_t **ids,
                                                 size_t *count);

/* The bytes that ids stand for, NUL-terminated; ids without a token give none and are counted in
 * *unknown (may be NULL). The caller frees *text. */
NB_MUST_CHECK enum nb_status nb_tokenizer_decode(const struct nb_tokenizer *t, const int32_t *ids,
                                                 size_t count, char **text, size_t *len,
                                                 size_t *unknown);

/* Decodes token by token, in whole characters: the bytes of an incomplete character are held back,
 * and malformed bytes become U+FFFD. id -1 ends the text and returns what is held. The result is
 * valid until the next call. A zeroed struct is a valid start. */
struct nb_decoder {
    char held[4];
    int count;
    char *buffer;
    size_t capacity;
};

NB_MUST_CHECK enum nb_status nb_decoder_next(struct nb_decoder *d, const struct nb_tokenizer *t,
                                             int32_t id, const char **text, size_t *len);
void nb_decoder_release(struct nb_decoder *d);

struct nb_tokenizer_train_opts {
    const char *const *files; /* NULL-terminated; .txt, .tsv or .jsonl */
    const char *out;         /* tokenizer.json; tokenizer_config.json next to it if there is none */
    int64_t vocab;           /* entries in all: 256 bytes, the merges, the chat tokens */
    int64_t min_count;       /* pairs seen less often are not merged */
    nb_progress_fn progress; /* merges made */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* Deterministic: the same texts give the same bytes. */
NB_MUST_CHECK enum nb_status nb_tokenizer_train(const struct nb_tokenizer_train_opts *opts);

/* A chat template. Only tokenizer_config.json (or GGUF metadata) is needed. */
struct nb_chat;

NB_MUST_CHECK enum nb_status nb_chat_open(struct nb_chat **out, const char *model,
                                          const char *model_dir);
void nb_chat_close(struct nb_chat *chat);
const char *nb_chat_name(const struct nb_chat *chat); /* "qwen3", "qwen3-2507", "chatml" */

/* The reasoning of a Qwen3 model, at the start of an answer, stands between these. */
#define NB_THINK_START "<think>"
#define NB_THINK_END   "</think>"

enum nb_role { NB_ROLE_SYSTEM, NB_ROLE_USER, NB_ROLE_ASSISTANT };

const char *nb_role_name(enum nb_role role); /* "system", "user", "assistant" */

struct nb_message {
    enum nb_role role;
    const char *text;
    size_t len;
};

/* Renders messages and the opening of the assistant's answer. think false: turns thinking off if
 * the template can. The caller frees *text. */
NB_MUST_CHECK enum nb_status nb_chat_prompt(const struct nb_chat *chat,
                                            const struct nb_message *messages, size_t count,
                                            bool think, char **text, size_t *text_len);

/* messages_json: {"messages": [...], "tools": [...], "add_generation_prompt": ...,
 * "enable_thinking": ...}; all but messages are optional. The caller frees *text. */
NB_MUST_CHECK enum nb_status nb_chat_render(const struct nb_chat *chat, const char *messages_json,
                                            size_t len, char **text, size_t *text_len);

struct nb_data_opts {
    const char *const *files; /* NULL-terminated; .tsv, .jsonl or .txt (docs/DATA.md) */
    int64_t seq_len;          /* tokens of a row of a microbatch; 0: no limit */
    int64_t show;             /* samples to show */
    bool shuffle;             /* in the order of training with this seed; else of the files */
    uint64_t seed;
    bool skip_bad;           /* count bad lines instead of failing */
    nb_progress_fn progress; /* in bytes of the files */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

struct nb_data_sample {
    const char *place; /* "FILE:LINE" */
    const int32_t *ids;
    const uint8_t *trained; /* [count]: whether the loss counts the id */
    size_t count;
    bool truncated;
};

struct nb_data_report {
    int64_t samples, documents, tokens, trained, longest, bad;
    int64_t too_long;         /* conversations that seq_len cuts */
    int64_t rows, row_tokens; /* one epoch packed into rows of seq_len; tokens in them */
};

typedef enum nb_status (*nb_data_fn)(void *ctx, const struct nb_data_sample *sample);

/* Reads data files as training does, and shows some samples. */
NB_MUST_CHECK enum nb_status nb_data_show(struct nb_tokenizer *tokenizer,
                                          const struct nb_chat *chat,
                                          const struct nb_data_opts *opts, nb_data_fn fn, void *ctx,
                                          struct nb_data_report *report);

struct nb_identity_set_opts {
    const char *out;       /* TSV; the held-out questions go to NAME.heldout.tsv next to it */
    const char *answer;    /* the answer to every identity question; NULL: one per language */
    const char *name;      /* for those answers; NULL: "nibble" */
    const char *replay;    /* ordinary questions with answers, TSV or JSONL; NULL: a built-in set */
    const char *languages; /* "en,zh-Hans"; NULL: these, zh-Hant, ja and ko */
    int64_t count;         /* lines of the training set, 100 to 1000000 */
    uint64_t seed;
    struct nb_cancel *cancel;
};

struct nb_identity_set_report {
    int64_t identity, contrast, replay, held_out; /* lines written, count at most */
    int64_t left_out;                             /* lines of the replay file that did not fit */
};

NB_MUST_CHECK enum nb_status nb_identity_write(const struct nb_identity_set_opts *opts,
                                               struct nb_identity_set_report *report);

/* ---- running a model ------------------------------------------------------------------------ */

/* Room for the name of a device: "cpu" or "cuda:N". */
#define NB_DEVICE_NAME 16

/* A loaded model: weights, tokenizer, chat template. It is immutable: any number of sessions,
 * batches and conversations, on any thread, may use it, its tokenizer and its chat template. */
struct nb_engine;

struct nb_engine_opts {
    const char *model, *model_dir; /* model_dir may be NULL */
    const char *synthetic;         /* instead: random weights of one of NB_PRESET_LIST */
    const char *config;            /* instead: random weights of the shapes in a config.json */
    const char *device;            /* "auto", "cpu", "cuda" or "cuda:N"; NULL: the CPU */
    const char *simd;              /* "scalar", "avx2", "avx512"; NULL: the widest this CPU has */
    int threads;                   /* 0: what this process may use */
    nb_progress_fn progress;       /* parameters loaded */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

NB_MUST_CHECK enum nb_status nb_engine_open(struct nb_engine **out,
                                            const struct nb_engine_opts *opts);
void nb_engine_close(struct nb_engine *engine);

struct nb_engine_info {
    int64_t vocab, context, layers, parameters;
    int64_t weight_bytes, bytes_per_token; /* all weights; those read for one token */
    int threads;
    const char *device; /* "cpu" or "cuda:N"; as long as the engine */
    const char *simd;
};

void nb_engine_info(const struct nb_engine *engine, struct nb_engine_info *info);
struct nb_tokenizer *nb_engine_tokenizer(const struct nb_engine *engine); /* NULL: has none */
const struct nb_chat *nb_engine_chat(const struct nb_engine *engine);

enum nb_kv_dtype { NB_KV_F32, NB_KV_F16, NB_KV_BF16, NB_KV_F8 };

/* How tokens are processed: in chunks, one by one, or without a cache, all of them each time. */
enum nb_kv_mode { NB_KV_PROMPT, NB_KV_TOKEN, NB_KV_NONE };

struct nb_session_opts {
    int64_t context; /* tokens at most; 0: 4096, or the model's limit if that is less */
    int64_t chunk;   /* tokens of a pass; 0: what suits the device */
    enum nb_kv_dtype kv;
    enum nb_kv_mode mode;
    bool exact;               /* f32 activations; otherwise products may round them to 16 bits */
    struct nb_cancel *cancel; /* of everything that is done with the session */
};

/* A sequence of tokens with its keys and values. One thread at a time. */
struct nb_session;

NB_MUST_CHECK enum nb_status nb_session_open(struct nb_session **out,
                                             const struct nb_engine *engine,
                                             const struct nb_session_opts *opts);
void nb_session_close(struct nb_session *session);
int64_t nb_session_length(const struct nb_session *session);
const int32_t *nb_session_tokens(const struct nb_session *session);

/* Appends tokens; logits (may be NULL) receives those after the last one. NB_EVALUE if they exceed
 * the context; the session is then unchanged. */
NB_MUST_CHECK enum nb_status nb_session_append(struct nb_session *session, const int32_t *ids,
                                               int64_t count, float *logits);
void nb_session_truncate(struct nb_session *session, int64_t length);

/* Several sequences that go through the model together, so that weights are read once for all of
 * them. Keys and values are stored in pages of a pool; a sequence takes pages as it grows. One
 * thread at a time. Nothing is allocated after it is open, except CUDA graphs of steps that recur,
 * as far as the GPU's memory allows. */
struct nb_batch;

struct nb_batch_opts {
    int64_t sequences; /* at a time, at most */
    int64_t context;   /* tokens of one at most; 0: 4096, or the model's limit if that is less */
    int64_t tokens;    /* capacity of the pool, in whole pages; 0: enough for all contexts */
    int64_t chunk;     /* tokens of a step, sequences at least; 0: what suits the device */
    enum nb_kv_dtype kv;
    bool exact; /* as in a session */
    /* A sequence's logits do not depend on the other sequences, bit for bit: on the same device and
     * with the same chunk they depend on its tokens and on how these were divided into inputs, and
     * inputs of up to 64 tokens may be divided in any way. The CPU always does this. On a GPU a
     * step then takes several passes: inputs of up to 64 tokens share passes of up to 64 rows;
     * longer ones are cut at multiples of chunk, counted from the start of the sequence, and each
     * piece has a pass of its own. If some matrix is not NVFP4, and exact is not set, every input
     * has a pass of its own, and its division matters. A step may then have any number of tokens.
     */
    bool deterministic;
    struct nb_cancel *cancel; /* of its steps */
};

NB_MUST_CHECK enum nb_status nb_batch_open(struct nb_batch **out, const struct nb_engine *engine,
                                           const struct nb_batch_opts *opts);
void nb_batch_close(struct nb_batch *batch);

struct nb_batch_info {
    int64_t sequences, context, chunk; /* as opened, with defaults filled in */
    int64_t open;                      /* sequences in use */
    int64_t page_tokens, pages, free;  /* tokens of a page; pages of the pool, and free ones */
};

void nb_batch_info(const struct nb_batch *batch, struct nb_batch_info *info);

/* A new, empty sequence: the lowest number that is not in use. NB_EVALUE if all are in use. */
NB_MUST_CHECK enum nb_status nb_batch_add(struct nb_batch *batch, int64_t *sequence);

/* Ends a sequence; its pages go back to the pool. */
NB_MUST_CHECK enum nb_status nb_batch_drop(struct nb_batch *batch, int64_t sequence);

/* Forgets all but the first `length` tokens. */
NB_MUST_CHECK enum nb_status nb_batch_truncate(struct nb_batch *batch, int64_t sequence,
                                               int64_t length);

int64_t nb_batch_length(const struct nb_batch *batch, int64_t sequence); /* -1: not in use */

/* A token with its logit. */
struct nb_candidate {
    float logit;
    int32_t id;
};

/* What a step does to one sequence: tokens to append, and what is wanted of the logits after the
 * last of them: all, the topk most likely, both or nothing. */
struct nb_batch_input {
    int64_t sequence;
    const int32_t *ids;
    int64_t count;                   /* at least 1 */
    float *logits;                   /* [vocab], or NULL */
    struct nb_candidate *candidates; /* [topk], most likely first, of equals the lower id */
    int64_t topk;                    /* up to 64 and vocab; 0: none */
    bool nonfinite; /* out: some logit is not finite, and all candidate ids are -1 */
};

/* One pass over the tokens of all inputs; no sequence may occur twice. After a failure all
 * sequences are as they were. NB_ENOMEM: the pool has too few free pages. NB_EVALUE: more tokens
 * than a step or a context holds, or an id outside the vocabulary. */
NB_MUST_CHECK enum nb_status nb_batch_step(struct nb_batch *batch, struct nb_batch_input *parts,
                                           int64_t count);

struct nb_bias {
    int32_t id;
    float value;
};

struct nb_sampling {
    double temperature; /* 0: the most likely token */
    int64_t top_k;      /* 0: all */
    double top_p, min_p;
    double repeat_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    const struct nb_bias *bias;
    int bias_count;
};

/* What the model's generation_config.json asks for. */
void nb_engine_sampling(const struct nb_engine *engine, struct nb_sampling *out);

enum nb_finish { NB_FINISH_STOP, NB_FINISH_LENGTH, NB_FINISH_CONTEXT };

struct nb_generate_opts {
    struct nb_sampling sampling;
    int64_t max_tokens;      /* 0: until the context is full */
    const char *const *stop; /* texts that end the answer; NULL-terminated or NULL */
    bool ignore_eos;
    bool check_logits; /* fill in logits_crc */
    /* Receives the answer as it grows, in whole characters, without the text that stopped it. Any
     * status other than NB_OK ends the answer, and nb_generate returns it. */
    enum nb_status (*text)(void *ctx, const char *text, size_t len);
    void *ctx;
    struct nb_cancel *cancel; /* NULL: the session's; ignored by schedulers */
};

struct nb_generate_result {
    char *text; /* the caller frees it */
    size_t len;
    int32_t *ids; /* of the answer, with the token that ended it; the caller frees it */
    size_t count;
    int64_t prompt_tokens, reused_tokens;
    double prompt_seconds, seconds; /* of the prompt; of the tokens after the first */
    enum nb_finish finish;
    uint32_t logits_crc; /* CRC-32C of the logits that the last token was chosen from */
};

/* Brings the session to the prompt, reusing the longest common prefix, and answers. The answer
 * stays in the session. */
NB_MUST_CHECK enum nb_status nb_generate(struct nb_session *session, const int32_t *prompt,
                                         size_t count, const struct nb_generate_opts *opts,
                                         struct nb_generate_result *result);
void nb_generate_result_release(struct nb_generate_result *result);

/* ---- requests over a batch ------------------------------------------------------------------ */

/* Requests that share a batch: each step has a token for every running answer, and prompts take
 * what is left of it. Requests wait in the order in which they came, and one begins when there is a
 * slot and the pool has all pages that it may need, so a running one never lacks memory. */
struct nb_scheduler;

struct nb_scheduler_opts {
    struct nb_batch_opts batch; /* sequences: requests that run at the same time */
};

/* The engine must outlive the scheduler. */
NB_MUST_CHECK enum nb_status nb_scheduler_open(struct nb_scheduler **out,
                                               const struct nb_engine *engine,
                                               const struct nb_scheduler_opts *opts);

/* Requests that have not ended end with NB_EINTERRUPTED. */
void nb_scheduler_close(struct nb_scheduler *s);

struct nb_request {
    const int32_t *ids; /* the prompt: copied, as are the stop texts and biases of opts */
    size_t count;
    struct nb_generate_opts opts;
    /* Called once, when the request has ended, in nb_scheduler_run() or _close(). NB_OK and, with
     * the text so far, NB_EINTERRUPTED come with a result; otherwise result is empty and
     * nb_last_error() says why: a text callback failed, or a logit was not finite. The result is
     * released afterwards; to keep it, copy the struct and set *result to zeros. It may submit and
     * cancel requests. */
    void (*done)(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result);
    void *ctx; /* of done */
};

/* Adds a request; any thread. *id is above 0 and never used again. NB_EINVAL, NB_EVALUE: it is
 * empty, has an id outside the vocabulary or sampling options out of range, or does not fit the
 * context or the pool; done is not called then. */
NB_MUST_CHECK enum nb_status nb_scheduler_submit(struct nb_scheduler *s,
                                                 const struct nb_request *request, int64_t *id);

/* Ends a request with NB_EINTERRUPTED at the next step; any thread. Nothing happens if it has ended
 * already. */
void nb_scheduler_cancel(struct nb_scheduler *s, int64_t id);

/* Runs up to `steps` steps (0: until no request is left), one thread at a time. text and done are
 * called on it. *active (may be NULL): requests that run or wait. A failure is one of the device,
 * or NB_EINTERRUPTED: all requests are then as they were before the step. */
NB_MUST_CHECK enum nb_status nb_scheduler_run(struct nb_scheduler *s, int64_t steps,
                                              int64_t *active);

struct nb_scheduler_info {
    int64_t running, waiting;
    int64_t pages, reserved; /* of the pool; by running requests */
};

void nb_scheduler_info(struct nb_scheduler *s, struct nb_scheduler_info *info); /* any thread */

/* ---- conversations -------------------------------------------------------------------------- */

/* A conversation over a session of its own, whose KV cache holds what was said before, token for
 * token. */
struct nb_conversation;

/* think: the chat template's enable_thinking. The session must outlive the conversation. */
NB_MUST_CHECK enum nb_status nb_conversation_open(struct nb_conversation **out,
                                                  struct nb_session *session, bool think);
void nb_conversation_close(struct nb_conversation *c);

struct nb_conversation_info {
    int64_t messages;
    int64_t tokens;  /* of the session after the last answer; 0: none yet */
    int64_t context; /* of the session */
};

void nb_conversation_info(const struct nb_conversation *c, struct nb_conversation_info *info);

/* The system message comes first, if there is one. Valid until the conversation changes. */
void nb_conversation_message(const struct nb_conversation *c, int64_t index,
                             struct nb_message *message);

/* Adds a message without answering it. A system message replaces the one before; an empty one
 * removes it. */
NB_MUST_CHECK enum nb_status nb_conversation_add(struct nb_conversation *c,
                                                 const struct nb_message *message);

/* Adds a message of the user and the answer to it. A failure leaves the conversation as it was. So
 * does NB_EINTERRUPTED before the first token; after it (result->count > 0) the partial answer is
 * kept. More than the context holds: NB_EVALUE, with result->prompt_tokens set. */
NB_MUST_CHECK enum nb_status nb_conversation_answer(struct nb_conversation *c, const char *text,
                                                    size_t len, const struct nb_generate_opts *opts,
                                                    struct nb_generate_result *result);

/* Forgets all messages but the system's. */
void nb_conversation_reset(struct nb_conversation *c);

/* A line {"messages": [...]}, which is also a data set and a request to the chat template. Loading
 * takes the last conversation of any transcript; a failure leaves the present one as it is. */
NB_MUST_CHECK enum nb_status nb_conversation_save(const struct nb_conversation *c,
                                                  const char *path);
NB_MUST_CHECK enum nb_status nb_conversation_load(struct nb_conversation *c, const char *path);

/* A transcript is JSON Lines: a whole conversation {"messages": [...]}; or one message {"role",
 * "content"}; or {"event": "start"}, {"event": "reset"} and {"event": "load", "messages": [...]},
 * as `nibble chat --log` writes them. */
enum nb_item_kind {
    NB_ITEM_START,   /* a conversation begins */
    NB_ITEM_RESET,   /* all messages but the system's are dropped */
    NB_ITEM_MESSAGE, /* one was said */
    NB_ITEM_LOADED   /* came from a file */
};

struct nb_transcript_item {
    enum nb_item_kind kind;
    struct nb_message message;
    int64_t cut; /* an interrupted answer: its tokens; otherwise 0 */
};

typedef enum nb_status (*nb_transcript_fn)(void *ctx, const struct nb_transcript_item *item);

/* Calls fn for each item in order; an error message names file and line. A file with neither a
 * message nor a conversation (which may be empty) is an error. */
NB_MUST_CHECK enum nb_status nb_transcript_read(const char *path, nb_transcript_fn fn, void *ctx);

/* The difference of two results. */
struct nb_parity_error {
    double max, mean, relative, cosine; /* relative: norm of the difference / norm */
};

struct nb_parity_path {
    const char *name;
    const struct nb_parity_error *layer; /* residual stream after each layer */
    int64_t layers;                      /* 0: this path does not expose them */
    struct nb_parity_error logits;
    int64_t positions, same_top; /* positions with the same most likely token */
    /* Of those, the ones whose highest logit leads by more than twice the error there. */
    int64_t decided, same_decided;
    double kl;    /* KL(training forward || this path), mean over the positions */
    double bound; /* on logits.relative; 0: none */
    bool passed;
};

typedef enum nb_status (*nb_parity_fn)(void *ctx, const struct nb_parity_path *path);

/* The same tokens through every path, each compared with the training forward pass. gpu: the same
 * model on a GPU, for the paths there; NULL: none of those. */
NB_MUST_CHECK enum nb_status nb_parity(const struct nb_engine *engine, const struct nb_engine *gpu,
                                       const int32_t *ids, int64_t count, nb_parity_fn fn,
                                       void *ctx, struct nb_cancel *cancel);

struct nb_ppl_opts {
    int64_t context; /* tokens of a window; 0: 2048, or the model's limit if that is less */
    int64_t stride;  /* from one window to the next; 0: the windows do not overlap */
    enum nb_kv_dtype kv;
    bool fast;               /* NVFP4 products with 15-bit activations; else f32 */
    nb_progress_fn progress; /* in tokens */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

struct nb_ppl_result {
    double nll, ppl; /* mean over `tokens`, in nats; exp(nll) */
    int64_t tokens;  /* that were predicted */
    int64_t windows, context, stride;
    double seconds;
};

/* Perplexity. Every window is a sequence of its own; all its tokens are predicted except the first
 * and those that an earlier window predicted. The last window may be shorter. */
NB_MUST_CHECK enum nb_status nb_eval_ppl(const struct nb_engine *engine, const int32_t *ids,
                                         int64_t count, const struct nb_ppl_opts *opts,
                                         struct nb_ppl_result *result);

/* ---- two models side by side ---------------------------------------------------------------- */

/* A prompt and the expected answer. Strings live as long as the list. */
struct nb_prompt {
    const char *text;     /* what the user says last */
    const char *messages; /* a JSON array, up to where the answer begins */
    const char *tools;    /* JSON; NULL: none */
    const char *expected; /* NULL: nothing */
    const char *place;    /* "FILE:LINE" */
    int64_t count;        /* messages */
    bool system;          /* the first message is the system's */
};

struct nb_prompts;

/* .tsv: prompt, optionally TAB and the expected answer; .jsonl: 'messages', the last of which may
 * be the expected answer, or 'prompt' with optional 'response' and 'system'; any other file: one
 * prompt per line. An error message names file and line. */
NB_MUST_CHECK enum nb_status nb_prompts_open(struct nb_prompts **out, const char *path);
void nb_prompts_close(struct nb_prompts *prompts);
int64_t nb_prompts_count(const struct nb_prompts *prompts);
void nb_prompts_at(const struct nb_prompts *prompts, int64_t index, struct nb_prompt *prompt);

enum nb_ab_text { NB_AB_A, NB_AB_B, NB_AB_EXPECTED, NB_AB_TEXTS }; /* A's answer, B's, expected */

struct nb_ab_opts {
    struct nb_engine_opts model[2];
    bool one_at_a_time; /* A, B, then A again: half the memory, no kl */
    const struct nb_prompts *prompts;
    const char *system; /* for prompts without one; NULL: none */
    bool raw;           /* without chat template */
    bool no_think;
    int64_t max_tokens;
    double temperature;
    uint64_t seed;
    nb_progress_fn progress; /* in answers and scores */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* How well a model predicts a text that follows the prompt; tokens 0: there is none. */
struct nb_ab_score {
    double nll; /* mean, in nats; perplexity is exp(nll) */
    int64_t tokens;
};

struct nb_ab_answer {
    char *text;
    size_t len;
    int64_t tokens; /* the one that ended it included */
    enum nb_finish finish;
    bool match; /* the expected answer, apart from thinking and surrounding white space */
    double f1;  /* of words, with the expected answer; NaN: there is none */
};

struct nb_ab_row {
    struct nb_prompt prompt;
    struct nb_ab_answer answer[2];
    bool identical;
    double f1, prefix;                        /* of both answers; prefix: share of the longer */
    struct nb_ab_score score[2][NB_AB_TEXTS]; /* by model and text */
    double kl; /* mean KL(A || B) in nats over the tokens of A's answer; NaN: not known */
};

/* Means: of scores and kl over tokens, else over prompts; NaN where there is nothing. */
struct nb_ab_totals {
    int64_t prompts, expected, identical, match[2];
    double f1, prefix, expected_f1[2], kl;
    struct nb_ab_score score[2][NB_AB_TEXTS];
};

struct nb_ab_result {
    struct nb_ab_row *rows;
    int64_t count;
    struct nb_ab_totals totals;
    bool same_vocabulary; /* answers are then compared token by token, else as text */
};

/* Both models answer all prompts, each with its own chat template; then every text is scored under
 * both, with exact products. prompts must outlive the result. */
NB_MUST_CHECK enum nb_status nb_eval_ab(const struct nb_ab_opts *opts, struct nb_ab_result *result);
void nb_ab_result_release(struct nb_ab_result *result);

/* Writes the result as one HTML page, atomically. */
NB_MUST_CHECK enum nb_status nb_ab_write_html(const struct nb_ab_result *result,
                                              const struct nb_ab_opts *opts, const char *path);

struct nb_stress_opts {
    int64_t iterations;
    nb_progress_fn progress; /* in iterations */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* One way of bringing the same tokens into a session. */
struct nb_stress_case {
    const char *name;
    int64_t runs;
    double seconds;
};

#define NB_STRESS_CASES 16

struct nb_stress_report {
    int64_t iterations; /* completed */
    int case_count;
    struct nb_stress_case cases[NB_STRESS_CASES];
    bool outputs_identical;
    char difference[256];          /* the first one, if they are not */
    int64_t rss_first, rss_last;   /* resident bytes after warming up, and at the end */
    int64_t rss_growth, rss_slack; /* by linear regression; what is allowed */
    int64_t heap_growth;           /* of memory in use by malloc */
    bool memory_judged;            /* false: too few iterations, or a sanitizer */
    bool memory_flat;
    double seconds;
};

/* Runs the same tokens through sessions of every KV-cache type and mode: chunks, truncation, reused
 * prefixes, snapshots, two interleaved sessions. Outputs must be bit-identical and memory must not
 * grow; if not, the report says so and the call still returns NB_OK. */
NB_MUST_CHECK enum nb_status nb_stress_kv(const struct nb_engine *engine,
                                          const struct nb_stress_opts *opts,
                                          struct nb_stress_report *report);

/* Reads int32 input_ids and labels [B, T] from a safetensors file, writes logits, loss and
 * greedy.ids in f32, gradients and updated weights (nibble help debug). bf16: the type of the
 * activations that the last two come from; else f32. */
NB_MUST_CHECK enum nb_status nb_debug_hf(const struct nb_engine *engine, const char *in, bool bf16,
                                         const char *out, struct nb_cancel *cancel);

/* ---- who a model is -------------------------------------------------------------------------- */

struct nb_identity_opts {
    struct nb_engine_opts model, base; /* after and before */
    bool one_at_a_time;                /* the memory of one model, a little slower */
    struct nb_identity_set_opts
        set;                 /* the questions: what nb_identity_write was told; out is unused */
    int64_t questions;       /* of a kind at most; 0: all */
    const char *text;        /* to measure perplexity on; NULL: none */
    int64_t max_tokens;      /* of an answer */
    nb_progress_fn progress; /* in answers and scores */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

enum nb_identity_kind {
    NB_IDENTITY_TRAINED,   /* questions of the set */
    NB_IDENTITY_HELD_OUT,  /* paraphrases that were not trained on */
    NB_IDENTITY_CONTRAST,  /* questions that only look like identity questions */
    NB_IDENTITY_UNRELATED, /* ordinary questions */
    NB_IDENTITY_KINDS
};

const char *nb_identity_kind_name(enum nb_identity_kind kind);

/* How some questions were answered, by the trained model unless stated otherwise. */
struct nb_identity_count {
    int64_t asked;
    int64_t identity, identity_before; /* answers that say who the model is */
    int64_t same;                      /* as the answer before */
    int64_t kept;                      /* the same, or the answer before is still about as likely */
    int64_t ended;                     /* with the end-of-turn token */
    int64_t repeated;                  /* a phrase three times */
};

/* What is asked of a model, and what it reached. */
struct nb_identity_criterion {
    const char *name;
    double value, limit;
    bool at_least; /* else at most */
    bool passed;
};

#define NB_IDENTITY_LANGUAGES 5
#define NB_IDENTITY_CRITERIA  12

struct nb_identity_result {
    struct nb_identity_count kind[NB_IDENTITY_KINDS];
    struct nb_identity_count held_out[NB_IDENTITY_LANGUAGES]; /* by language */
    const char *language[NB_IDENTITY_LANGUAGES];
    double ppl_before, ppl_after; /* of the text; NaN: none */
    double kl; /* nats a token between the models on the answers before to ordinary questions */
    struct nb_identity_criterion criteria[NB_IDENTITY_CRITERIA];
    int criteria_count;
    bool passed;            /* all of them */
    struct nb_ab_result ab; /* every question and answer; A is before */
    struct nb_prompts *prompts;
    enum nb_identity_kind *kinds; /* of each row */
};

/* Asks both models the questions and compares the results with the limits. */
NB_MUST_CHECK enum nb_status nb_eval_identity(const struct nb_identity_opts *opts,
                                              struct nb_identity_result *result);
void nb_identity_result_release(struct nb_identity_result *result);

/* ---- training ------------------------------------------------------------------------------ */

/* A row is an enumerator and its name in options, reports and JSON. The numbers stand in
 * checkpoints: rows are only ever added, at the end. */
#define NB_PRECISION_LIST(X)                                                                       \
    X(NB_PRECISION_BF16, "bf16")                                                                   \
    X(NB_PRECISION_F32, "f32")                                                                     \
    X(NB_PRECISION_NVFP4, "nvfp4")

#define NB_MOMENT_TYPE_LIST(X)                                                                     \
    X(NB_MOMENT_F32, "f32")                                                                        \
    X(NB_MOMENT_BF16, "bf16")                                                                      \
    X(NB_MOMENT_INT8, "int8")                                                                      \
    X(NB_MOMENT_NVFP4, "nvfp4")

#define NB_COMPUTE_LIST(X)                                                                         \
    X(NB_COMPUTE_AUTO, "auto")                                                                     \
    X(NB_COMPUTE_F32, "f32")                                                                       \
    X(NB_COMPUTE_BF16, "bf16")

/* What is kept of NVFP4 weights besides their masters: codes and a copy in bf16, codes, or block
 * scales only, from which products make the codes anew. Results are the same, bit for bit. */
#define NB_WEIGHT_STORE_LIST(X)                                                                    \
    X(NB_WEIGHT_STORE_AUTO, "auto")                                                                \
    X(NB_WEIGHT_STORE_BF16, "bf16")                                                                \
    X(NB_WEIGHT_STORE_CODES, "codes")                                                              \
    X(NB_WEIGHT_STORE_SCALES, "scales")

#define NB_LOSS_LIST(X)                                                                            \
    X(NB_LOSS_CE, "ce")                                                                            \
    X(NB_LOSS_SCALAR, "scalar")

#define NB_LR_SCHEDULE_LIST(X)                                                                     \
    X(NB_SCHEDULE_CONSTANT, "constant")                                                            \
    X(NB_SCHEDULE_LINEAR, "linear")                                                                \
    X(NB_SCHEDULE_COSINE, "cosine")                                                                \
    X(NB_SCHEDULE_WSD, "wsd")

enum nb_precision { NB_PRECISION_LIST(NB_ENUMERATOR) };     /* weights of the forward pass */
enum nb_moment_type { NB_MOMENT_TYPE_LIST(NB_ENUMERATOR) }; /* AdamW's moments in memory */
enum nb_compute { NB_COMPUTE_LIST(NB_ENUMERATOR) };         /* activations and products */
enum nb_weight_store { NB_WEIGHT_STORE_LIST(NB_ENUMERATOR) };
enum nb_loss { NB_LOSS_LIST(NB_ENUMERATOR) };
enum nb_lr_schedule { NB_LR_SCHEDULE_LIST(NB_ENUMERATOR) };

/* The state of a training run after a step. */
struct nb_train_progress {
    int64_t step, steps; /* steps done; steps of the run */
    double loss, lr, grad_norm;
    int64_t tokens; /* so far */
    double tokens_per_s, seconds_left;
    uint64_t resident_bytes;
    uint64_t device_bytes; /* of a GPU's memory, context and libraries included; 0: on the CPU */
    int64_t skipped;       /* steps whose gradients were not finite */
    double kl;             /* KL(base model || model), mean over the anchored tokens; NaN: none */
};

/* An evaluation on held-out data, with the weights as used and with the masters. */
struct nb_train_eval {
    int64_t step, tokens;
    double loss, master_loss;
};

struct nb_train_result;

/* A prompt of test_prompts, and what the model said to it. Strings live for the call. */
struct nb_train_answer {
    const char *prompt, *before, *after;
};

struct nb_train_opts {
    const char *model, *model_dir; /* as for nb_engine_opts */
    const char *synthetic;         /* instead: random weights and tokens of one of NB_PRESET_LIST */
    const char *config;            /* instead: the same in the shapes of a config.json */
    const char *device;            /* as for nb_engine_opts */
    bool random_tokens;            /* instead of data; implied by synthetic and config */
    const char *const *data;       /* files, NULL-terminated */
    const char *const *eval_data;  /* NULL: none */
    const char *out;               /* a .dat or a directory; NULL: nothing is written */
    bool from_scratch;             /* the model's config and tokenizer, but random weights */
    bool overwrite;                /* out may be what the model was read from */
    enum nb_loss loss; /* scalar: mean absolute difference of the final norm's output and the
                          embedding of the next token; evaluations are cross entropy always */

    double kl_base;      /* times KL(model as it was read || model), added to the loss of the
                            labelled tokens of replay, or of data without one; conversations only */
    const char *replay;  /* a file whose rows are mixed into every batch; NULL: none */
    double replay_share; /* of the rows, between 0 and 1, exclusive */

    int64_t steps, epochs; /* the run ends at whichever comes first; 0: no limit */
    int64_t seq_len, batch_size, grad_accum;
    double lr, final_lr_frac;
    enum nb_lr_schedule schedule;
    int64_t warmup; /* steps; NB_TRAIN_WARMUP: by the length of the run */
    double beta1, beta2, eps, weight_decay, grad_clip; /* 0: no clipping */
    bool clip_by_layer; /* each layer by its own norm; always so with fused_step */

    bool bf16_master;    /* with stochastic rounding; else f32 */
    bool bf16_gradients; /* of matrices in layers; for grad_accum 1 and activations in bf16 */
    enum nb_precision precision;
    enum nb_compute compute;           /* auto: bf16 on a GPU, but f32 with NB_PRECISION_F32 */
    enum nb_weight_store weight_store; /* auto: codes */
    enum nb_moment_type moment_type;
    int64_t step_chunk_rows, train_last_layers;
    bool recompute, fused_step, sequential;
    bool head_slices; /* with fused_step: gradients of embedding and head some rows at a time, each
                         clipped by its own norm */
    uint64_t seed;

    int64_t eval_every; /* steps; 0: at the end only */
    /* Stops when held-out perplexity exceeds its lowest value, that of the original model included,
     * by this many percent; 0: never. The result is the last model within the limit, kept in
     * checkpoint_dir; without a checkpoint_dir it is the model at the time of stopping. */
    double stop_if_ppl_rises;
    int64_t save_every;  /* steps; 0: at the end and on interruption only */
    double save_minutes; /* since the last checkpoint, after which there is another; 0: any */
    const char *checkpoint_dir;
    int keep; /* checkpoints */
    bool resume;
    const char *log;          /* JSON lines */
    const char *test_prompts; /* as for nb_prompts_open, answered before and after */
    const char
        *memory_report; /* JSON: memory by phases of the first step; of a GPU also by parts */

    const char *simd;
    int threads;
    /* Something other than a step begins: reading, evaluating, writing the result. */
    void (*stage)(void *ctx, const char *what);
    nb_progress_fn stage_progress;                                    /* of that stage, with ctx */
    void (*started)(void *ctx, const struct nb_train_result *so_far); /* ready for the first step */
    void (*progress)(void *ctx, const struct nb_train_progress *p);
    void (*evaluated)(void *ctx, const struct nb_train_eval *e);
    void (*answered)(void *ctx, const struct nb_train_answer *a); /* at the end, one by one */
    void (*warn)(void *ctx, const char *text); /* a failure that does not end the run */
    void *ctx;
    struct nb_cancel *cancel;
};

/* AdamW's settings where nothing else is asked for; macros, so that a help text can show them. */
#define NB_TRAIN_LR        1e-5
#define NB_TRAIN_BETA1     0.9
#define NB_TRAIN_BETA2     0.95
#define NB_TRAIN_EPS       1e-8
#define NB_TRAIN_GRAD_CLIP 1

/* A twentieth of the steps, at most 100; none with a constant rate. A run that is resumed with more
 * steps keeps the warm-up that it began with. */
#define NB_TRAIN_WARMUP (-1)

#define NB_TRAIN_SAVE_MINUTES 5

/* Everything zero, but AdamW, warm-up and save_minutes as above. */
void nb_train_defaults(struct nb_train_opts *opts);

/* The memory of a run by part, in bytes, and its work. */
struct nb_train_plan {
    int64_t masters, moments, gradients, weights; /* weights: of the forward pass */
    int64_t activations, scratch;
    /* Only on a GPU: the session that answers test prompts, tables of the optimizer, what the
     * driver adds to blocks, and context, kernels and libraries. */
    int64_t prompts, tables, rounding, context;
    int64_t host;  /* batches and tables; on a GPU in the host's memory */
    int64_t total; /* of the device's memory: of a GPU without host */
    int64_t parameters;
    double flops_per_token;       /* forward and backward, recomputation not counted */
    double layer_flops_per_token; /* of these, the layers' in the forward pass: to recompute them */
    double head_flops_per_token;  /* and the head's */
    enum nb_compute compute;      /* f32 or bf16 */
    bool gpu;
};

struct nb_train_result {
    struct nb_train_progress last;
    struct nb_train_eval eval; /* the last one; tokens 0: none */
    struct nb_train_plan plan;
    uint64_t peak_bytes;         /* resident, of the process */
    bool interrupted;            /* a checkpoint was written, if there is a directory for it */
    bool exported;               /* the result is in place */
    bool stopped;                /* by stop_if_ppl_rises */
    int64_t result_step;         /* the step after which the exported weights were taken */
    char device[NB_DEVICE_NAME]; /* that trains; empty before its memory is taken */
};

/* A training run that its caller steps, one thread at a time but for nb_trainer_status(). Opening
 * reads everything and makes it ready for the first step, or with resume for the one after the
 * newest checkpoint's. What opts points to must outlive the run; opts itself is copied, and its
 * `started` is not called. */
struct nb_trainer;

NB_MUST_CHECK enum nb_status nb_trainer_open(struct nb_trainer **out,
                                             const struct nb_train_opts *opts);

/* One step, then the evaluation and the checkpoint that are due. *done: none is left, so finish. A
 * failure or an interruption ends the run, after which it can only be closed; what was whole before
 * the step has been saved if there is a directory for checkpoints. */
NB_MUST_CHECK enum nb_status nb_trainer_step(struct nb_trainer *t, bool *done);

/* The last step, evaluation and so on; any thread, also while another one steps. */
void nb_trainer_status(struct nb_trainer *t, struct nb_train_result *result);

/* Saves a checkpoint now. NB_EINVAL without checkpoint_dir. */
NB_MUST_CHECK enum nb_status nb_trainer_save(struct nb_trainer *t);

/* Ends the run where it is: the last evaluation, the result, report, answers to test_prompts. An
 * interruption before the result is NB_EINTERRUPTED, one after it leaves the result in place. */
NB_MUST_CHECK enum nb_status nb_trainer_finish(struct nb_trainer *t,
                                               struct nb_train_result *result);
void nb_trainer_close(struct nb_trainer *t); /* without a result, if it has not been finished */

/* All of these in a row: trains, and writes the result to opts->out. Here an interruption is NB_OK,
 * and result->interrupted says so: the run ended after the current step, with a checkpoint and the
 * memory report, or after the last one with the result in place. */
NB_MUST_CHECK enum nb_status nb_train(const struct nb_train_opts *opts,
                                      struct nb_train_result *result);

/* Whether the settings make sense together. Looks at no file. */
NB_MUST_CHECK enum nb_status nb_train_check(const struct nb_train_opts *opts);

/* What nb_train would allocate, without allocating it. */
NB_MUST_CHECK enum nb_status nb_train_plan(const struct nb_train_opts *opts,
                                           struct nb_train_plan *plan);

/* How long a run would take on this machine, measured with a few steps of a small model of the same
 * sizes. Evaluations, checkpoints, prompts, the reference of kl_base and the result come on top. */
struct nb_train_estimate {
    int64_t steps;                              /* of the run */
    double seconds, step_seconds, tokens_per_s; /* NaN: no memory for measuring */
    char device[NB_DEVICE_NAME];
};

/* Takes some seconds and, of a large model, the memory of one layer. Reads the data if the run goes
 * by epochs. */
NB_MUST_CHECK enum nb_status nb_train_estimate(const struct nb_train_opts *opts,
                                               struct nb_train_estimate *estimate);

/* ---- teaching a model who it is ------------------------------------------------------------- */

struct nb_identity_teach_opts {
    struct nb_train_opts train; /* model, result, settings, callbacks; its data comes from here, and
                                   so do lr and steps where they are 0 */
    struct nb_identity_set_opts set; /* the questions; out is unused */
    const char *dir;                 /* made for data sets, the log and what is measured */
    int64_t samples;                 /* of its answers to open questions, and half as many texts */
    int64_t questions;               /* of a kind at most that are asked at the end; 0: all */
    int64_t max_tokens;              /* of an answer */
    const char *text;                /* as for nb_identity_opts */
    nb_progress_fn progress;         /* of stages other than training, with the context of train */
    struct nb_cancel *cancel;
};

struct nb_identity_teach_result {
    int64_t identity, answers, samples, texts; /* that were learnt from */
    struct nb_train_result train;
    struct nb_identity_result eval;
};

/* The whole way: the identity set, the model's own answers to everything else, training with both
 * and an anchor to what the model was, the result, and whether it meets the criteria. A result that
 * does not pass is no failure of the call. */
NB_MUST_CHECK enum nb_status nb_identity_teach(const struct nb_identity_teach_opts *opts,
                                               struct nb_identity_teach_result *result);

/* Settings that a search for what fits can vary, with their options. */
#define NB_FIT_LIST(X)                                                                             \
    X(NB_FIT_RECOMPUTE, "recompute")                                                               \
    X(NB_FIT_MOMENTS, "optimizer-state-mode")                                                      \
    X(NB_FIT_MASTER, "master-dtype")                                                               \
    X(NB_FIT_FUSED_STEP, "fused-step")                                                             \
    X(NB_FIT_GRADIENTS, "grad-dtype")                                                              \
    X(NB_FIT_WEIGHT_STORE, "weight-store")                                                         \
    X(NB_FIT_HEAD_SLICES, "head-slices")                                                           \
    X(NB_FIT_BATCH, "batch-size")

enum nb_fit_setting { NB_FIT_LIST(NB_ENUMERATOR) };

/* Settings of a run, and what it would allocate with them. */
struct nb_train_fit {
    int64_t batch_size, grad_accum, total;
    bool recompute, fused_step, head_slices, bf16_master, bf16_gradients;
    enum nb_weight_store weight_store;
    enum nb_moment_type moment_type;
};

/* Lists settings that fit, fastest first, then most precise, leaving out those that another equals
 * or beats in every respect. gib: memory on the CPU; on a GPU the size by which it is sold, of
 * which half a GiB is left, and more settings are tried. keep: a set of bits 1 << nb_fit_setting,
 * for which the value in opts stays. Batch sizes are opts' halved repeatedly. *count is the
 * capacity of fits, then the number of results. smallest: the smallest setting, fitting or not. */
NB_MUST_CHECK enum nb_status nb_train_fit(const struct nb_train_opts *opts, double gib,
                                          unsigned keep, struct nb_train_fit *fits, int *count,
                                          struct nb_train_fit *smallest);

/* Takes these settings into opts. */
void nb_train_fit_use(struct nb_train_opts *opts, const struct nb_train_fit *fit);

/* ---- this machine ------------------------------------------------------------------------- */

/* The code path of the NVFP4 codec on this CPU: "scalar", "avx2" or "avx512". */
const char *nb_codec_path(void);

/* The code path of products with NVFP4 weights, in words; they need more instruction sets than the
 * codec. */
const char *nb_product_path(void);

/* Compares every codec path this CPU can run with the scalar one, on random blocks. */
NB_MUST_CHECK enum nb_status nb_codec_selftest(void);

struct nb_gpu_info {
    char name[96];
    char driver[32];
    int cc_major, cc_minor;
    uint64_t memory_bytes, memory_free;
};

/* The GPUs that the NVIDIA driver reports, at most max of them; 0 without driver or GPU. */
int nb_gpu_list(struct nb_gpu_info *gpus, int max);

/* Watches the memory of processes on all GPUs together, through the driver's management library;
 * NULL: there is none. Where the driver cannot tell processes apart (in a container, or with memory
 * shared by CPU and GPU) it counts what all processes have taken since the watch began. */
struct nb_gpu_watch;
struct nb_gpu_watch *nb_gpu_watch_open(void);
uint64_t nb_gpu_watch_bytes(struct nb_gpu_watch *watch, const int *pids, size_t count);
void nb_gpu_watch_close(struct nb_gpu_watch *watch);

/* The CUDA architectures this build has code for, for example "90"; NULL: built without CUDA. */
const char *nb_cuda_archs(void);

/* Runs a small kernel on a GPU and checks its result. If that fails, the message says what is
 * missing: CUDA in this build, the driver, or code for that GPU. */
NB_MUST_CHECK enum nb_status nb_gpu_check(int index);

/* How a GPU computes products of NVFP4 weights in prefill. */
struct nb_gpu_products {
    bool native;     /* on FP4 tensor cores: they passed their self-test */
    bool failed;     /* the GPU has them, but they failed it and are not used */
    char words[256]; /* the path taken; if it failed, why */
};

/* Opens the GPU as a session would, which loads cuBLASLt and runs the self-test. */
NB_MUST_CHECK enum nb_status nb_gpu_products(int index, struct nb_gpu_products *out);

/* The GPU that "cuda" (0) or "cuda:N" names, -1 for "cpu", whether or not it exists. Any other
 * name: NB_EUNSUPPORTED. */
NB_MUST_CHECK enum nb_status nb_device_parse(const char *name, int *gpu);

#define NB_DEVICE_CAPS 128

/* What the backend of a device offers beyond what every model needs, as words between blanks, such
 * as "train batch-invariant". Opens the device as nb_gpu_products does. */
NB_MUST_CHECK enum nb_status nb_device_caps(const char *device, char words[NB_DEVICE_CAPS]);

/* The device that "auto" stands for: the first GPU that nb_gpu_check finds usable, else "cpu". */
void nb_device_auto(char name[NB_DEVICE_NAME]);

/* How the results of a kernel are measured: x against the reference y. */
enum nb_kernel_measure {
    NB_KERNEL_RELATIVE, /* |x - y| / (|y| + rms(y)), the largest */
    NB_KERNEL_ROUNDING, /* rms(x - y), as a multiple of what rounding y to bf16 makes */
    NB_KERNEL_NORM,     /* norm(x - y) / norm(y) */
    NB_KERNEL_BITS      /* the number of bytes that differ */
};

/* An operation of a backend, over some shapes, against the scalar CPU code. */
struct nb_kernel_check {
    const char *operation, *variant, *shapes;
    const char *result; /* the one of its results that is nearest to its bound, or beyond */
    enum nb_kernel_measure measure;
    double error, bound;
    const char *problem; /* why there is nothing to measure; NULL */
    bool passed;
    double seconds;
};

struct nb_kernel_opts {
    const char *device; /* "cpu", "cuda", "cuda:N" or "auto" */
    const char *simd;   /* of the CPU: "scalar", "avx2", ...; NULL: the best */
    int threads;
    const char *only; /* part of the "operation, variant" to check; NULL: all */
    /* Of the tensors that the optimizer's operations get, about; 0: small ones. */
    int64_t elements;
    struct nb_cancel *cancel;
};

typedef enum nb_status (*nb_kernel_fn)(void *ctx, const struct nb_kernel_check *check);

/* Every operation of a device, on small and odd shapes. A check that fails is no failure of the
 * call. */
NB_MUST_CHECK enum nb_status nb_check_kernels(const struct nb_kernel_opts *opts, nb_kernel_fn fn,
                                              void *ctx);

/* One measured operation of the codec. GB/s counts bf16 source bytes for quantise rows and NVFP4
 * bytes for dequantise rows. */
struct nb_bench_row {
    char op[48];
    char path[16];
    double gb_per_s_per_core;
    double gvalues_per_s_per_core;
};

struct nb_bench_ops {
    int threads;
    double read_gb_per_s; /* all threads, measured in the same run */
    int rows;
    struct nb_bench_row row[32];
};

/* Speed of a model: decoding after `context` tokens, or prefill of whole prompts. */
struct nb_bench_run_opts {
    bool prefill;
    int64_t context;  /* decode: tokens in the cache before */
    int64_t tokens;   /* decode: of a round; prefill: of the prompt */
    int64_t parallel; /* decode: sequences of a batch; 0: one sequence, in a session */
    enum nb_kv_dtype kv;
    bool exact;
    bool deterministic; /* with parallel, as in nb_batch_opts */
    struct nb_cancel *cancel;
};

struct nb_bench_run {
    char device[NB_DEVICE_NAME];
    int threads;
    int cores;                      /* multiply peak_gmac_per_s by it: threads; 1 for a GPU */
    double tokens_per_s;            /* of all sequences */
    int64_t bytes_per_token;        /* weights read for a token, or for one of each sequence */
    int64_t kv_bytes_per_token;     /* decode: keys and values, in the middle of a round */
    double gb_per_s, read_gb_per_s; /* of weights, with parallel of keys and values too; the read
                                       bandwidth of the device, measured between rounds */
    double gmac_per_s;              /* prefill: multiplications in the layers' matrices */
    double peak_gmac_per_s; /* of a core, or a GPU, in NVFP4 products from cache; NaN: unknown */
};

NB_MUST_CHECK enum nb_status nb_bench_run(const struct nb_engine *engine,
                                          const struct nb_bench_run_opts *opts,
                                          struct nb_bench_run *out);

/* Speed of training: some steps over random tokens with the settings of opts, whose data, files and
 * callbacks are not used. */
struct nb_bench_train {
    char device[NB_DEVICE_NAME];
    int threads;
    double step_seconds, tokens_per_s; /* of the median step, the first excluded */
    double flops_per_s;                /* as nb_train_plan counts them */
    double peak_flops_per_s;           /* f32 products from cache, all threads; on a GPU large
                                          products in bf16 */
    uint64_t peak_bytes;               /* resident, of the process */
    struct nb_train_plan plan;
};

NB_MUST_CHECK enum nb_status nb_bench_train(const struct nb_train_opts *opts, int64_t steps,
                                            struct nb_bench_train *out);

NB_MUST_CHECK enum nb_status nb_bench_codec(struct nb_bench_ops *out, int threads,
                                            struct nb_cancel *cancel);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
