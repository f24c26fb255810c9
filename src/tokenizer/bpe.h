/* bpe.h - byte-level BPE: text to ids and back.
 *
 * struct nbi_bpe holds the tables. It never changes once built, and threads may share it. struct
 * nbi_encoder holds the state of encoding and belongs to one thread at a time; tokenizer.h keeps a
 * pool of them. */
#pragma once

#include "tokenizer/vocab.h"

struct nbi_bpe;

/* Copies what it needs from v, which may be released afterwards. */
enum nb_status nbi_bpe_new(struct nbi_bpe **out, const struct nbi_vocab *v);
void nbi_bpe_free(struct nbi_bpe *bpe);

int64_t nbi_bpe_size(const struct nbi_bpe *bpe); /* one more than the highest id */

/* Returns the bytes of a token, owned by bpe; NULL: no token has this id. */
const char *nbi_bpe_token(const struct nbi_bpe *bpe, int64_t id, size_t *len);

/* The id of the added token with this text; -1: none. */
int64_t nbi_bpe_added(const struct nbi_bpe *bpe, const char *text);
bool nbi_bpe_special(const struct nbi_bpe *bpe, int64_t id); /* whether an id is a special token */

/* A growing list of token ids. */
struct nbi_ids {
    int32_t *p;
    size_t count, cap;
};

enum nb_status nbi_ids_reserve(struct nbi_ids *ids, size_t more); /* capacity for `more` ids */
void nbi_ids_release(struct nbi_ids *ids);

struct nbi_encoder;

enum nb_status nbi_encoder_new(struct nbi_encoder **out, const struct nbi_bpe *bpe);
void nbi_encoder_free(struct nbi_encoder *e);

/* Appends the ids of a text. Malformed UTF-8 is read as U+FFFD, one for each maximal ill-formed
 * subsequence. Added tokens are recognised; special ones only if `special` is set. */
enum nb_status nbi_encode(struct nbi_encoder *e, const char *text, size_t len, bool special,
                          struct nbi_ids *ids);
