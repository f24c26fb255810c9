/* example.h - one record as tokens, each marked as trained on or not.
 *
 * in : a line of a TSV or JSONL file, or a piece of a text (records.h)
 * out: ids, and which of them the model learns to produce
 *
 * A conversation goes through the model's own chat template. Trained are the assistant's words and
 * the end-of-turn token behind them, which teaches the model to stop; nothing else is. The prompt
 * and each answer are tokenized apart, as they are when the model is used. Documents are trained on
 * whole, with the end-of-text token behind them. */
#pragma once

#include "data/records.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/tokenizer.h"

struct nbi_example {
    struct nbi_ids ids;
    uint8_t *trained; /* one for each id */
    size_t capacity;  /* of trained */
    bool document;    /* may be cut anywhere */
};

void nbi_example_release(struct nbi_example *s);

struct nbi_example_encoder {
    struct nb_tokenizer *tokenizer; /* borrowed; NULL: samples are checked, not tokenized */
    enum nbi_chat_kind chat;
    bool checked; /* that the tokenizer has the tokens of a conversation */
    struct nbi_str a, b, request;
};

void nbi_example_encoder_release(struct nbi_example_encoder *e);

/* A TSV line that only names its columns is no sample. */
bool nbi_example_is_header(const char *line, size_t len);

/* Replaces *out. record->ends: a document ends here. */
enum nb_status nbi_example_make(struct nbi_example_encoder *e, enum nbi_data_kind kind,
                                const char *text, size_t len, bool ends, struct nbi_example *out);

/* A record that is a question and its answer: a TSV line, or a JSONL line with 'prompt' and
 * 'response' or with one message of each. Replaces both. */
enum nb_status nbi_example_pair(enum nbi_data_kind kind, const char *text, size_t len,
                                struct nbi_str *prompt, struct nbi_str *answer);

/* What a model is to answer: a record whose answer, if there is one, is only expected. */
struct nbi_prompt {
    struct nbi_str text;     /* what the user says last */
    struct nbi_str messages; /* a JSON array, up to where the answer begins */
    struct nbi_str tools;    /* JSON; empty: none */
    struct nbi_str expected; /* empty: nothing */
    int64_t count;           /* messages */
    bool system;             /* the first of them is the system's */
};

void nbi_prompt_release(struct nbi_prompt *p);

/* A text is a prompt as it is, a TSV line a prompt and maybe an answer, a JSONL line has 'messages'
 * (the last may be the answer) or 'prompt' and maybe 'response' and 'system'. Replaces *out. */
enum nb_status nbi_example_prompt(enum nbi_data_kind kind, const char *text, size_t len,
                                  struct nbi_prompt *out);

/* Every text that a record holds, for learning a vocabulary. */
typedef enum nb_status (*nbi_text_fn)(void *ctx, const char *text, size_t len);
enum nb_status nbi_example_texts(enum nbi_data_kind kind, const char *text, size_t len,
                                 nbi_text_fn fn, void *ctx);

/* Shortens a sample to max tokens, at least 2: a document loses its end; of a conversation the
 * beginning goes, so that the last answer stays, and the end of that only if it would not fit
 * beside an eighth of the prompt. false: nothing was done. */
bool nbi_example_truncate(struct nbi_example *s, size_t max);
