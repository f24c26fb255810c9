/* eval.h - measuring models: perplexity, two models side by side, and whether every way of
 * computing gives the same.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/data.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- perplexity ------------------------------------------------------------------------------ */

struct nb_ppl_opts {
    int64_t context; /* tokens of a window; 0: 2048, or the model's limit if that is less */
    int64_t stride;  /* from one window to the next; 0: the windows do not overlap */
    enum nb_kv_dtype kv;
    bool fast;               /* NVFP4 products with 16-bit activations; else f32 */
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
 * and those that an earlier window predicted. The last window may be shorter. NB_EVALUE: fewer than
 * two tokens, an id outside the vocabulary, windows longer than the model allows, or a logit that
 * is not finite. */
NB_MUST_CHECK enum nb_status nb_eval_ppl(const struct nb_engine *engine, const int32_t *ids,
                                         int64_t count, const struct nb_ppl_opts *opts,
                                         struct nb_ppl_result *result);

/* ---- two models side by side ----------------------------------------------------------------- */

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
 * both, with exact products. The result has strings of prompts, which must outlive it. */
NB_MUST_CHECK enum nb_status nb_eval_ab(const struct nb_ab_opts *opts, struct nb_ab_result *result);
void nb_ab_result_release(struct nb_ab_result *result);

/* Writes the result as one HTML page, in one step: after a failure path is as it was. opts: those
 * of the result. */
NB_MUST_CHECK enum nb_status nb_ab_write_html(const struct nb_ab_result *result,
                                              const struct nb_ab_opts *opts, const char *path);

/* ---- one model, computed in several ways ----------------------------------------------------- */

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

/* What path points to is valid during the call. */
typedef enum nb_status (*nb_parity_fn)(void *ctx, const struct nb_parity_path *path);

/* The same tokens through every path, each compared with the training forward pass: fn is called
 * for each. A path that does not pass is no failure of the call. gpu: the same model on a GPU, for
 * the paths there; NULL: none of those. cancel may be NULL. */
NB_MUST_CHECK enum nb_status nb_eval_parity(const struct nb_engine *engine,
                                            const struct nb_engine *gpu, const int32_t *ids,
                                            int64_t count, nb_parity_fn fn, void *ctx,
                                            struct nb_cancel *cancel);

struct nb_stress_opts {
    int64_t iterations;
    nb_progress_fn progress; /* in iterations */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* One way of bringing the same tokens into a session; name is a constant. */
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
 * grow; if not, the report says so and the call still returns NB_OK. The memory is that of the
 * process, so other threads should do nothing meanwhile. */
NB_MUST_CHECK enum nb_status nb_eval_stress(const struct nb_engine *engine,
                                            const struct nb_stress_opts *opts,
                                            struct nb_stress_report *report);

/* Reads int32 input_ids and labels [B, T] from a safetensors file, writes logits, loss and
 * greedy.ids in f32, gradients and updated weights (nibble help debug). bf16: the type of the
 * activations that the last two come from; else f32. After a failure out is as it was. cancel may
 * be NULL. */
NB_MUST_CHECK enum nb_status nb_eval_hf(const struct nb_engine *engine, const char *in, bool bf16,
                                        const char *out, struct nb_cancel *cancel);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
