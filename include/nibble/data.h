/* data.h - training a tokenizer, looking at training data, lists of prompts.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- tokenizers ------------------------------------------------------------------------------ */

struct nb_tokenizer_train_opts {
    const char *const *files; /* NULL-terminated; .txt, .tsv or .jsonl */
    const char *out;         /* tokenizer.json; tokenizer_config.json next to it if there is none */
    int64_t vocab;           /* entries in all: 256 bytes, the merges, the chat tokens */
    int64_t min_count;       /* pairs seen less often are not merged */
    nb_progress_fn progress; /* merges made */
    void *progress_ctx;
    struct nb_cancel *cancel;
};

/* Learns a vocabulary from texts and writes it: the same texts give the same bytes. After a failure
 * out is as it was, unless the message says that it is in place. NB_EFORMAT: a line that training
 * would refuse, or no text at all. */
NB_MUST_CHECK enum nb_status nb_tokenizer_train(const struct nb_tokenizer_train_opts *opts);

/* ---- training data --------------------------------------------------------------------------- */

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

/* What sample points to is valid during the call. */
typedef enum nb_status (*nb_data_fn)(void *ctx, const struct nb_data_sample *sample);

/* Reads data files as training does, and calls fn for the first opts->show samples. NB_EFORMAT: a
 * line that training would refuse; the message names file and line. */
NB_MUST_CHECK enum nb_status nb_data_show(struct nb_tokenizer *tokenizer,
                                          const struct nb_chat *chat,
                                          const struct nb_data_opts *opts, nb_data_fn fn, void *ctx,
                                          struct nb_data_report *report);

/* ---- prompts --------------------------------------------------------------------------------- */

/* A prompt and the expected answer. The strings belong to the list. */
struct nb_prompt {
    const char *text;     /* what the user says last */
    const char *messages; /* a JSON array, up to where the answer begins */
    const char *tools;    /* JSON; NULL: none */
    const char *expected; /* NULL: nothing */
    const char *place;    /* "FILE:LINE" */
    int64_t count;        /* messages */
    bool system;          /* the first message is the system's */
};

/* A list of prompts. Any number of threads may use it at once. */
struct nb_prompts;

/* .tsv: prompt, optionally TAB and the expected answer; .jsonl: 'messages', the last of which may
 * be the expected answer, or 'prompt' with optional 'response' and 'system'; any other file: one
 * prompt per line. NB_EFORMAT: a line is none of these; the message names it. NB_EVALUE: there is
 * no prompt. */
NB_MUST_CHECK enum nb_status nb_prompts_open(struct nb_prompts **out, const char *path);
void nb_prompts_close(struct nb_prompts *prompts);
int64_t nb_prompts_count(const struct nb_prompts *prompts);

/* index is below nb_prompts_count(). */
void nb_prompts_at(const struct nb_prompts *prompts, int64_t index, struct nb_prompt *prompt);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
