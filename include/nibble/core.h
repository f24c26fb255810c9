/* core.h - models, sessions, answers, batches, schedulers, training runs; errors, logging and
 * cancelling, which the other headers share.
 *
 * Every function that can fail returns enum nb_status; on failure nb_last_error() holds one line
 * that says what failed, on what and why. Nothing in the library prints, exits or aborts on bad
 * input. Strings are UTF-8; sizes and offsets are 64 bits wide. Unless a comment says otherwise,
 * functions may be called from several threads as long as each works on its own objects. */
#pragma once

#include "nibble/train.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct nb_tokenizer; /* text.h */
struct nb_chat;

/* ---- status ---------------------------------------------------------------------------------- */

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

/* ---- logging, progress, cancelling ----------------------------------------------------------- */

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

/* ---- engines --------------------------------------------------------------------------------- */

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

struct nb_engine_info {
    int64_t vocab, context, layers, parameters;
    int64_t weight_bytes, bytes_per_token; /* all weights; those read for one token */
    int threads;
    const char *device; /* "cpu" or "cuda:N"; as long as the engine */
    const char *simd;
    struct nb_sampling sampling; /* what the model's generation_config.json asks for */
};

void nb_engine_info(const struct nb_engine *engine, struct nb_engine_info *info);
struct nb_tokenizer *nb_engine_tokenizer(const struct nb_engine *engine); /* NULL: has none */
const struct nb_chat *nb_engine_chat(const struct nb_engine *engine);

/* ---- sessions -------------------------------------------------------------------------------- */

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

/* The tokens of the session, *count of them (may be NULL). The array is the session's, at the same
 * place until it is closed. */
const int32_t *nb_session_tokens(const struct nb_session *session, int64_t *count);

/* Appends tokens; logits (may be NULL) receives those after the last one. NB_EVALUE if they exceed
 * the context; the session is then unchanged. */
NB_MUST_CHECK enum nb_status nb_session_append(struct nb_session *session, const int32_t *ids,
                                               int64_t count, float *logits);
void nb_session_truncate(struct nb_session *session, int64_t length);

/* ---- answers --------------------------------------------------------------------------------- */

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

/* ---- batches --------------------------------------------------------------------------------- */

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

/* ---- schedulers ------------------------------------------------------------------------------ */

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

/* ---- training runs --------------------------------------------------------------------------- */

/* Everything zero, AdamW as above. */
void nb_train_defaults(struct nb_train_opts *opts);

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

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
