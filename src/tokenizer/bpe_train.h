/* bpe_train.h - learns a byte-level BPE vocabulary from text.
 *
 * in : texts, in any order
 * out: a struct nbi_vocab with Qwen's pre-tokenizer and chat tokens
 *
 * Words are counted first. Then the most frequent adjacent pair of tokens becomes a new token,
 * until the vocabulary is full. Ties go to the pair with the lower ids, so the result does not
 * depend on the order of the texts. It equals what BpeTrainer of the tokenizers library produces.
 */
#pragma once

#include "tokenizer/chat_template.h"
#include "tokenizer/vocab.h"

struct nbi_bpe_trainer;

enum nb_status nbi_bpe_trainer_new(struct nbi_bpe_trainer **out);
void nbi_bpe_trainer_free(struct nbi_bpe_trainer *t);

/* Counts the words of a text. Chat tokens separate texts and are not learnt. */
enum nb_status nbi_bpe_trainer_add(struct nbi_bpe_trainer *t, const char *text, size_t len);

size_t nbi_bpe_trainer_words(const struct nbi_bpe_trainer *t); /* distinct words so far */

struct nbi_bpe_trainer_opts {
    int64_t vocab;           /* size, chat tokens included; at least NBI_BPE_TRAINER_MIN */
    int64_t min_count;       /* pairs seen less often become no token */
    nb_progress_fn progress; /* in tokens; may be NULL */
    void *progress_ctx;
};

/* 256 bytes and the chat tokens. */
#define NBI_BPE_TRAINER_MIN (256 + NBI_CHAT_TOKENS)

/* Fails if `vocab` is no possible size. */
enum nb_status nbi_bpe_trainer_check(int64_t vocab);

/* Builds the vocabulary and drops the counts. It is smaller than requested if the text runs out of
 * pairs. The caller releases v, also after a failure. */
enum nb_status nbi_bpe_trainer_run(struct nbi_bpe_trainer *t,
                                   const struct nbi_bpe_trainer_opts *opts, struct nbi_vocab *v);
