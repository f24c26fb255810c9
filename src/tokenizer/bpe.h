/* bpe.h - byte-level BPE: text to ids and back.
 *
 * The tables (struct nbi_bpe) never change once made and may be shared by threads; what changes
 * while encoding (struct nbi_encoder) belongs to one thread. nbi_tokenizer_encode (handle.h) has
 * encoders for all of them. */
#pragma once

#include "tokenizer/vocab.h"

struct nbi_bpe;

/* Takes what it needs from v, which may be released afterwards. */
enum nb_status nbi_bpe_new(struct nbi_bpe **out, const struct nbi_vocab *v);
void nbi_bpe_free(struct nbi_bpe *bpe);

int64_t nbi_bpe_size(const struct nbi_bpe *bpe); /* all ids are smaller */

/* The bytes of a token, borrowed; NULL: no token has this id. */
const char *nbi_bpe_token(const struct nbi_bpe *bpe, int64_t id, size_t *len);

/* The id of the added token with this text, or -1; whether an id is a special token. */
int64_t nbi_bpe_added(const struct nbi_bpe *bpe, const char *text);
bool nbi_bpe_special(const struct nbi_bpe *bpe, int64_t id);

struct nbi_ids {
    int32_t *p;
    size_t count, cap;
};

enum nb_status nbi_ids_reserve(struct nbi_ids *ids, size_t more);
void nbi_ids_release(struct nbi_ids *ids);

struct nbi_encoder;

enum nb_status nbi_encoder_new(struct nbi_encoder **out, const struct nbi_bpe *bpe);
void nbi_encoder_free(struct nbi_encoder *e);

/* Appends the ids of a text. Malformed UTF-8 counts as U+FFFD, one per maximal part. Added tokens
 * are found in it; those that are special only if special is set. */
enum nb_status nbi_encode(struct nbi_encoder *e, const char *text, size_t len, bool special,
                          struct nbi_ids *ids);
