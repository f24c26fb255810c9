/* identity.h - teaching a model who it is, and measuring whether it knows.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/eval.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- questions ------------------------------------------------------------------------------- */

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

/* Writes the two files, each in one step, the held-out one first; after a failure the message says
 * if that one is in place. report may be NULL. */
NB_MUST_CHECK enum nb_status nb_identity_write(const struct nb_identity_set_opts *opts,
                                               struct nb_identity_set_report *report);

/* ---- measuring ------------------------------------------------------------------------------- */

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

/* "trained", "held-out", "contrast", "unrelated" */
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
    bool passed;                  /* all of them */
    struct nb_ab_result ab;       /* every question and answer; A is before */
    struct nb_prompts *prompts;   /* the questions; released with the result */
    enum nb_identity_kind *kinds; /* of each row */
};

/* Asks both models the questions and compares the results with the limits. A model that does not
 * pass is no failure of the call. */
NB_MUST_CHECK enum nb_status nb_identity_eval(const struct nb_identity_opts *opts,
                                              struct nb_identity_result *result);
void nb_identity_result_release(struct nb_identity_result *result);

/* ---- teaching -------------------------------------------------------------------------------- */

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
 * does not pass is no failure of the call. After a failure *result says how far it came: if
 * train.exported is set, the result is in place; eval is all zeros. After a success the caller
 * releases eval. */
NB_MUST_CHECK enum nb_status nb_identity_teach(const struct nb_identity_teach_opts *opts,
                                               struct nb_identity_teach_result *result);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
