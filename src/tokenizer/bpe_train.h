/* bpe_train.h - a vocabulary learnt from text: byte-level BPE.
 *
 * in : texts, in any order and any pieces
 * out: a struct nbi_vocab with Qwen's rules and chat tokens
 *
 * Words are counted first; then the most frequent pair of neighbours becomes a token, again and
 * again. Ties go to the pair with the lower ids, so that the result depends on the texts alone, not
 * on their order. The same as the BpeTrainer of the tokenizers library makes. */
#pragma once

#include "tokenizer/chat_template.h"
#include "tokenizer/vocab.h"

struct nbi_bpe_trainer;

enum nb_status nbi_bpe_trainer_new(struct nbi_bpe_trainer **out);
void nbi_bpe_trainer_free(struct nbi_bpe_trainer *t);

/* Counts the words of a text. Chat tokens in it separate texts and are not learnt. */
enum nb_status nbi_bpe_trainer_add(struct nbi_bpe_trainer *t, const char *text, size_t len);

size_t nbi_bpe_trainer_words(const struct nbi_bpe_trainer *t); /* different ones counted so far */

struct nbi_bpe_trainer_opts {
    int64_t vocab;           /* entries in all, NBI_BPE_TRAINER_MIN at least */
    int64_t min_count;       /* a pair seen less often is not worth a token */
    nb_progress_fn progress; /* tokens made; may be NULL */
    void *progress_ctx;
};

/* 256 bytes and the chat tokens. */
#define NBI_BPE_TRAINER_MIN (256 + NBI_CHAT_TOKENS)

/* Whether a vocabulary of that size can be made. */
enum nb_status nbi_bpe_trainer_check(int64_t vocab);

/* Fewer entries than asked for if the text has no more pairs. Uses up what was counted. v is
 * released by the caller, also on failure. */
enum nb_status nbi_bpe_trainer_run(struct nbi_bpe_trainer *t,
                                   const struct nbi_bpe_trainer_opts *opts, struct nbi_vocab *v);
