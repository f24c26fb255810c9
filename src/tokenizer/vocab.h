/* vocab.h - a tokenizer as data: what tokenizer.json and a GGUF both hold. Text is not encoded here
 * (bpe.h).
 *
 * Byte-level BPE: a vocabulary, merges, added tokens, rules for cutting text into words. Anything
 * else a tokenizer.json may ask for is named and refused. */
#pragma once

#include "base/arena.h"
#include "formats/store.h"
#include "formats/writer.h"
#include "tokenizer/pretokenizer.h"

/* GGUF's numbers. */
enum nbi_token_type {
    NBI_TOKEN_NORMAL = 1,
    NBI_TOKEN_CONTROL = 3,
    NBI_TOKEN_USER = 4,
    NBI_TOKEN_UNUSED = 5
};

#define NBI_VOCAB_MAX (1 << 22) /* ids are smaller */

/* How an added token is looked for in a text. */
enum nbi_token_flags {
    NBI_TOKEN_LSTRIP = 1,      /* takes the white space before it */
    NBI_TOKEN_RSTRIP = 2,      /* and behind it */
    NBI_TOKEN_SINGLE_WORD = 4, /* not inside a word */
    NBI_TOKEN_NORMALIZED = 8,  /* in the text after NFC */
    NBI_TOKEN_MODEL = 16       /* part of the vocabulary that the merges make */
};

struct nbi_token {
    const char *text; /* byte-level form; added tokens as they are; NULL: no token has this id */
    uint32_t len;
    uint8_t type;  /* enum nbi_token_type */
    uint8_t flags; /* enum nbi_token_flags */
};

struct nbi_vocab {
    struct nbi_arena arena;
    struct nbi_token *tokens;
    int64_t count;
    const char **merges; /* "left right" */
    int64_t merge_count;
    size_t merge_capacity;
    bool nfc;           /* text is normalised first */
    bool ignore_merges; /* a word that is a token needs no merges */
    struct nbi_split_rules split;
    const char *chat_template; /* NULL: none */
    int64_t bos, eos, pad;     /* -1: none */
    bool add_bos;
};

void nbi_vocab_init(struct nbi_vocab *v); /* empty, Qwen's rules, no special tokens */
void nbi_vocab_release(struct nbi_vocab *v);

/* From a tokenizer.json alone. */
enum nb_status nbi_vocab_read_json(struct nbi_vocab *v, const char *path);

/* From DIR/tokenizer.json, and DIR/tokenizer_config.json and DIR/chat_template.jinja for the
 * chat template and special tokens if those are there. NB_ENOTFOUND without tokenizer.json. */
enum nb_status nbi_vocab_read_dir(struct nbi_vocab *v, const char *dir);

/* Only the chat template and the special tokens; a directory without those files gives none. */
enum nb_status nbi_vocab_read_config(struct nbi_vocab *v, const char *dir);

/* NB_ENOTFOUND if the file holds no tokenizer. */
enum nb_status nbi_vocab_read_gguf(struct nbi_vocab *v, const struct nbi_store *store);

/* Writes a tokenizer.json, a tokenizer_config.json, or both into a directory. Qwen's rules only. */
enum nb_status nbi_vocab_write_json(const struct nbi_vocab *v, const char *path);
enum nb_status nbi_vocab_write_config(const struct nbi_vocab *v, const char *path);
enum nb_status nbi_vocab_write_dir(const struct nbi_vocab *v, const char *dir);

/* Gives id its token; ids grow the table, a second text for one id is an error. The text must live
 * as long as v: in its arena, or a constant. */
enum nb_status nbi_vocab_set(struct nbi_vocab *v, int64_t id, struct nbi_token token);

/* text: "left right", which must live as long. */
enum nb_status nbi_vocab_add_merge(struct nbi_vocab *v, const char *text, size_t len);

/* NFC, Qwen's pattern, all merges. */
bool nbi_vocab_is_qwen(const struct nbi_vocab *v);

/* The byte that a character of the byte-level alphabet stands for, or -1; and back. */
int nbi_byte_of(uint32_t character);
uint32_t nbi_byte_character(uint8_t byte);

/* Call once all tokens are set. */
void nbi_vocab_finish(struct nbi_vocab *v);

/* Appends the metadata for a model of vocab_size rows, at least v->count; ids without a token
 * become "[PADn]". */
enum nb_status nbi_vocab_write_gguf(const struct nbi_vocab *v, struct nbi_gguf_meta *meta,
                                    int64_t vocab_size);

/* The ids of special tokens, which also make sense without a vocabulary. */
void nbi_vocab_write_ids(const struct nbi_vocab *v, struct nbi_gguf_meta *meta);
