/* data.h - training a tokenizer, looking at training data, lists of prompts. */
#pragma once

#include "nibble/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

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

/* ---- prompts --------------------------------------------------------------------------------- */

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

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
