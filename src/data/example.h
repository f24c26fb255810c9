/* example.h - one record as tokens with a loss mask.
 *
 * A conversation is rendered by the model's own chat template. Trained on are the assistant's
 * messages and the end-of-turn token after each, which teaches the model to stop. Prompts and
 * answers are tokenized separately, as they are at inference. A document is trained on in full,
 * with the end-of-text token after it. */
#pragma once

#include "data/records.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/tokenizer.h"

struct nbi_example {
    struct nbi_ids ids;
    uint8_t *trained; /* for each id, whether the loss counts it as a target */
    size_t capacity;  /* of trained */
    bool document;    /* text, which may be cut anywhere */
};

void nbi_example_release(struct nbi_example *x);

struct nbi_example_encoder {
    struct nb_tokenizer *tokenizer; /* borrowed; NULL: examples are checked, not tokenized */
    enum nbi_chat_kind chat;
    bool checked;                       /* the tokenizer has the tokens of the chat template */
    struct nbi_str a, b, messages_json; /* scratch */
};

void nbi_example_encoder_release(struct nbi_example_encoder *e);

/* Whether a TSV line names its columns and so is no example. */
bool nbi_example_is_header(const char *line, size_t len);

/* Makes an example from a record's text, replacing *out. ends: the document ends with this record.
 */
enum nb_status nbi_example_make(struct nbi_example_encoder *e, enum nbi_data_kind kind,
                                const char *text, size_t len, bool ends, struct nbi_example *out);

/* Reads a record that is one question and one answer: a TSV line, or a JSONL line with 'prompt' and
 * 'response' or with two messages. Replaces both strings. */
enum nb_status nbi_example_pair(enum nbi_data_kind kind, const char *text, size_t len,
                                struct nbi_str *prompt, struct nbi_str *answer);

/* A prompt for a model to answer. The answer in the record, if any, is the expected one. */
struct nbi_prompt {
    struct nbi_str text;     /* the last message of the user */
    struct nbi_str messages; /* a JSON array, without the expected answer */
    struct nbi_str tools;    /* JSON; empty: none */
    struct nbi_str expected; /* empty: none */
    int64_t count;           /* messages */
    bool system;             /* the first message is a system message */
};

void nbi_prompt_release(struct nbi_prompt *p);

/* Reads a prompt, replacing *out. A text is a prompt as it stands. A TSV line is a prompt and an
 * optional answer. A JSONL line has 'messages', of which the last may be the answer, or 'prompt'
 * and optionally 'response' and 'system'. */
enum nb_status nbi_example_prompt(enum nbi_data_kind kind, const char *text, size_t len,
                                  struct nbi_prompt *out);

/* Passes every text in a record to fn, for training a tokenizer. */
typedef enum nb_status (*nbi_text_fn)(void *ctx, const char *text, size_t len);
enum nb_status nbi_example_texts(enum nbi_data_kind kind, const char *text, size_t len,
                                 nbi_text_fn fn, void *ctx);

/* Shortens an example to max (at least 2) tokens. A document loses its end. A conversation loses
 * its beginning, so that the last answer stays; if that answer and a prompt of max / 8 tokens do
 * not fit, the answer loses its end. false: it was short enough. */
bool nbi_example_truncate(struct nbi_example *x, size_t max);
