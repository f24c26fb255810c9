/* core.h - the core of libnibble: errors, engines, sessions, answers, batches, schedulers, training
 * runs. First the rules for every function of the library; exceptions stand at the functions.
 *
 * Failures. A function that can fail returns enum nb_status. If that is not NB_OK, nb_last_error()
 * has one line that says what failed, on what and why. Outputs that the caller would own (an
 * object, a text, an array, a result with a _release function) are then NULL or all zeros. Other
 * outputs are untouched, and the objects that the call was about are as they were. Nothing in the
 * library prints, exits or aborts on bad input.
 *
 * Ownership. Whoever opens an object closes it, after everything that was opened with it: sessions,
 * batches and schedulers before their engine. A _close function also takes NULL. Texts and arrays
 * that come back through pointers are freed with free(), results with their _release function,
 * which leaves zeros. All other pointers that come back belong to their object, and are valid as
 * long as it is. Arguments, and what options point to, are only used during the call; a struct
 * nb_cancel is used until the object that was opened with it is closed.
 *
 * Threads. Any thread may call any function. An object is used by one thread at a time, not
 * necessarily the one that opened it; engines, tokenizers, chat templates and lists of prompts
 * never change, and any number of threads may use one at once. Different objects may be used at the
 * same time, also if they belong to one engine. Callbacks are called on the thread that made the
 * call. They may use the library, but not the object that the call is about. If one returns a
 * status other than NB_OK, the call ends and returns it.
 *
 * Options. Zero an options struct before filling it in; members that have a default then have it.
 * Pointers are not NULL unless a comment allows it. Strings are UTF-8; sizes and offsets are 64
 * bits wide. */
#pragma once

#include "nibble/train.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct nb_tokenizer; /* text.h, as is the next */
struct nb_chat;

/* ---- status ---------------------------------------------------------------------------------- */

/* NB_EINVAL: arguments that are never possible; NB_EVALUE: ones that do not suit this model, object
 * or file. NB_EFORMAT: a file that is damaged or not of its format; NB_EUNSUPPORTED: one, or a
 * device, that is of a kind nibble does not have. */
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

/* The name of a status in words, for example "malformed file"; of a number that is none, "unknown
 * status". */
const char *nb_status_text(enum nb_status status);

/* The message of the last failure on this thread, empty before the first. Only of use right after a
 * call has failed: the next call may change the text, also one that succeeds. */
const char *nb_last_error(void);

/* "MAJOR.MINOR.PATCH (commit)". */
const char *nb_version(void);

/* ---- logging, progress, cancelling ----------------------------------------------------------- */

enum nb_log_level { NB_LOG_ERROR, NB_LOG_WARN, NB_LOG_INFO, NB_LOG_DEBUG };

typedef void (*nb_log_fn)(void *ctx, enum nb_log_level level, const char *line);

/* Where log lines go, for the whole process; NULL drops them (the default). Call it before any
 * other thread uses the library. fn is called on the thread that logs, so perhaps on several at
 * once; line is valid during the call. */
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

/* Any thread, at any time; signal handlers may call both. */
void nb_cancel_set(struct nb_cancel *cancel);
void nb_cancel_clear(struct nb_cancel *cancel);

/* ---- engines --------------------------------------------------------------------------------- */

/* A loaded model: weights, tokenizer, chat template. It is immutable: any number of threads may use
 * it, its tokenizer and its chat template at once. */
struct nb_engine;

struct nb_engine_opts {
    const char *model, *model_dir; /* model_dir may be NULL */
    const char *synthetic;         /* instead: random weights, one of NB_PRESET_LIST (files.h) */
    const char *config;            /* instead: random weights of the shapes in a config.json */
    const char *device;            /* "auto", "cpu", "cuda" or "cuda:N"; NULL: the CPU */
    const char *simd;              /* "scalar", "avx2", "avx512"; NULL: the widest this CPU has */
    int threads;                   /* 0: what this process may use */
    nb_progress_fn progress;       /* parameters loaded */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* Reads the weights into the memory of the device. Files that change later do not matter. */
NB_MUST_CHECK enum nb_status nb_engine_open(struct nb_engine **out,
                                            const struct nb_engine_opts *opts);
void nb_engine_close(struct nb_engine *engine);

struct nb_bias {
    int32_t id;
    float value;
};

/* How the next token is drawn. A zeroed one is not valid: begin with that of nb_engine_info, or
 * with 1 for temperature, top_p and repeat_penalty. */
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
    int64_t weight_bytes;    /* in the files; 0: random weights */
    int64_t bytes_per_token; /* of weights, read for one token */
    int threads;
    const char *device; /* "cpu" or "cuda:N" */
    const char *simd;
    struct nb_sampling sampling; /* what the model's generation_config.json asks for */
};

void nb_engine_info(const struct nb_engine *engine, struct nb_engine_info *info);

/* The engine's own, not to be closed. NULL: the model has neither. Any number of threads may use
 * them, so there is no need for copies. */
struct nb_tokenizer *nb_engine_tokenizer(const struct nb_engine *engine);
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

/* A sequence of tokens with its keys and values. */
struct nb_session;

/* Takes the memory that the session will need, except that of CUDA graphs. NB_EVALUE: the model was
 * made for shorter contexts. */
NB_MUST_CHECK enum nb_status nb_session_open(struct nb_session **out,
                                             const struct nb_engine *engine,
                                             const struct nb_session_opts *opts);
void nb_session_close(struct nb_session *session);

/* The tokens of the session, *count of them (count may be NULL). The array stays where it is;
 * appending and truncating change what is in it. */
const int32_t *nb_session_tokens(const struct nb_session *session, int64_t *count);

/* Appends tokens; logits [vocab] (may be NULL) receives those after the last one. NB_EVALUE: they
 * do not fit the context, or an id is outside the vocabulary. After a failure the session has the
 * tokens that it had before, and what is in logits is undefined. */
NB_MUST_CHECK enum nb_status nb_session_append(struct nb_session *session, const int32_t *ids,
                                               int64_t count, float *logits);

/* Forgets all but the first `length` tokens; nothing if there are no more. */
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
     * status other than NB_OK ends the answer, and is the status of the answer. */
    enum nb_status (*text)(void *ctx, const char *text, size_t len);
    void *ctx;
    struct nb_cancel *cancel; /* of this answer; NULL: in nb_generate the session's */
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

/* Brings the session to the prompt, reusing the longest common prefix, and answers: a scheduler of
 * one request, over the session. The answer stays in it. NB_EINTERRUPTED comes with a result too:
 * the answer so far. After a failure the session is as it was, or has a beginning of prompt and
 * answer. NB_EINVAL: an empty prompt, or sampling options out of range; NB_EVALUE: a prompt that
 * does not fit the context, an id outside the vocabulary, or a logit that is not finite. */
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

/* NB_EVALUE: the model was made for shorter contexts. */
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

/* Ends a sequence; its pages go back to the pool. NB_EINVAL: it is not in use. */
NB_MUST_CHECK enum nb_status nb_batch_drop(struct nb_batch *batch, int64_t sequence);

/* Forgets all but the first `length` tokens. NB_EINVAL: the sequence is not in use, or shorter. */
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
    enum nb_status status;           /* out: of this input */
};

/* One pass over the tokens of all inputs, each of which succeeds or fails by itself. Only where
 * status is NB_OK have the tokens been appended; other sequences are as they were.
 *
 * Inputs are checked in their order. One that is refused takes no room and no pages from those
 * after it, and nothing is written to its logits and candidates:
 *   NB_EINVAL  there is no such sequence, or an earlier input is for it, even a refused one; count
 *              or topk is out of range; ids are missing, or candidates
 *   NB_EVALUE  an id is outside the vocabulary, or there are more tokens than the context has room
 *              for, or the step after the inputs before it
 *   NB_ENOMEM  the pool has too few free pages, after those that inputs before it take
 * NB_EVALUE is also the status of an input for which a logit is not finite, if it wants any: logits
 * are then those that were computed, and all candidates are {NaN, -1}.
 *
 * Returns NB_OK if there are inputs, and those that were accepted could be computed; all may have
 * been refused. nb_last_error() then has the message of the last input that failed; refused ones
 * fail before others. Another status concerns the whole step, for example NB_EDEVICE or
 * NB_EINTERRUPTED: all sequences are as they were, and that is the status of every input that was
 * not refused. */
NB_MUST_CHECK enum nb_status nb_batch_step(struct nb_batch *batch, struct nb_batch_input *inputs,
                                           int64_t count);

/* ---- schedulers ------------------------------------------------------------------------------ */

/* Requests that share a batch: each step has a token for every running answer, and prompts take
 * what is left of it. Requests wait in the order in which they came, and one begins when there is a
 * slot and the pool has all pages that it may need, so a running one never lacks memory.
 *
 * A scheduler of one sequence runs its requests over a session in place of a batch: on a GPU that
 * decodes faster, and tokens that a prompt has in common with the request before it, or with that
 * one's answer, are not computed again. On a GPU the bits of logits may depend on which these are,
 * so there a deterministic scheduler of one sequence has a batch. */
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
    const int32_t *ids; /* the prompt: copied, as are stop texts and biases; opts.cancel is not */
    size_t count;
    struct nb_generate_opts opts;
    /* Called once, when the request has ended, in nb_scheduler_run() or _close(). NB_OK and, with
     * the text so far, NB_EINTERRUPTED come with a result; otherwise result is empty, for example
     * because a text callback failed or a logit was not finite. nb_last_error() says why it was not
     * NB_OK. The result is released afterwards; to keep it, copy the struct and set *result to
     * zeros. It may submit and cancel requests. */
    void (*done)(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result);
    void *ctx; /* of done */
};

/* Adds a request; any thread. *id is above 0 and never used again. NB_EINVAL, NB_EVALUE: it is
 * empty, has an id outside the vocabulary or sampling options out of range, or does not fit the
 * context or the pool; done is not called then. */
NB_MUST_CHECK enum nb_status nb_scheduler_submit(struct nb_scheduler *s,
                                                 const struct nb_request *request, int64_t *id);

/* Ends a request with NB_EINTERRUPTED at the next step; any thread. Nothing happens if it has ended
 * already. Its opts.cancel does the same. */
void nb_scheduler_cancel(struct nb_scheduler *s, int64_t id);

/* Runs up to `steps` steps (0: until no request is left), one thread at a time. text and done are
 * called on it. *active (may be NULL): requests that run or wait, after a failure too. A failure is
 * one of the device, or NB_EINTERRUPTED: all requests are then as they were before the step. */
NB_MUST_CHECK enum nb_status nb_scheduler_run(struct nb_scheduler *s, int64_t steps,
                                              int64_t *active);

struct nb_scheduler_info {
    int64_t running, waiting;
    int64_t pages, reserved; /* of the pool, or a session's context; by running requests */
};

void nb_scheduler_info(struct nb_scheduler *s, struct nb_scheduler_info *info); /* any thread */

/* ---- training runs --------------------------------------------------------------------------- */

/* Everything zero, but AdamW, warm-up and save_minutes as NB_TRAIN_LR and its neighbours say. */
void nb_train_defaults(struct nb_train_opts *opts);

/* Whether the settings make sense together; NB_EINVAL if not. Looks at no file. */
NB_MUST_CHECK enum nb_status nb_train_check(const struct nb_train_opts *opts);

/* What nb_train would allocate, without allocating it. Reads the headers of the model's files. */
NB_MUST_CHECK enum nb_status nb_train_plan(const struct nb_train_opts *opts,
                                           struct nb_train_plan *plan);

/* A training run that its caller steps, one thread at a time but for nb_trainer_status(). Opening
 * reads everything and makes it ready for the first step, or with resume for the one after the
 * newest checkpoint's. What opts points to must outlive the run; opts itself is copied, and its
 * `started` is not called. */
struct nb_trainer;

NB_MUST_CHECK enum nb_status nb_trainer_open(struct nb_trainer **out,
                                             const struct nb_train_opts *opts);
void nb_trainer_close(struct nb_trainer *t); /* without a result, if it has not been finished */

/* One step, then the evaluation and the checkpoint that are due; with stop_if_ppl_rises the first
 * call only evaluates. *done: none is left, so finish;
 * false after a failure. A failure or an interruption ends the run, after which it can only be
 * closed; what was whole before the step has been saved if there is a directory for checkpoints.
 * NB_EINVAL: the run has ended before. */
NB_MUST_CHECK enum nb_status nb_trainer_step(struct nb_trainer *t, bool *done);

/* The last step, evaluation and so on; any thread, also while another one steps. */
void nb_trainer_status(struct nb_trainer *t, struct nb_train_result *result);

/* Saves a checkpoint now. A failure does not end the run. NB_EINVAL: there is no checkpoint_dir, or
 * the run has ended. */
NB_MUST_CHECK enum nb_status nb_trainer_save(struct nb_trainer *t);

/* Ends the run where it is: the result, the last evaluation, report, answers to test_prompts. Only
 * the evaluation that stop_if_ppl_rises needs comes before the result, and may be interrupted
 * (NB_EINTERRUPTED); later an interruption leaves out what follows the result, and is NB_OK with
 * result->interrupted. *result is filled in whatever is returned. NB_EINVAL: the run has ended
 * before. */
NB_MUST_CHECK enum nb_status nb_trainer_finish(struct nb_trainer *t,
                                               struct nb_train_result *result);

/* All of these in a row: trains, and writes the result to opts->out. Here an interruption is NB_OK,
 * and result->interrupted says so: the run ended after the current step, with a checkpoint and the
 * memory report, or after the last one with the result in place. *result says how far it came,
 * whatever is returned. */
NB_MUST_CHECK enum nb_status nb_train(const struct nb_train_opts *opts,
                                      struct nb_train_result *result);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
