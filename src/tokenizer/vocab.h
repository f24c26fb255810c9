/* vocab.h - a tokenizer as data, read from tokenizer.json or GGUF and written back. Encoding is
 * bpe.h.
 *
 * Byte-level BPE: vocabulary, merges, added tokens, pre-tokenizer rules. Anything else that a
 * tokenizer.json asks for is an error that names it. */
#pragma once

#include "base/arena.h"
#include "formats/store.h"
#include "formats/writer.h"
#include "tokenizer/pretokenizer.h"

/* The numbers of GGUF. */
enum nbi_token_type {
    NBI_TOKEN_NORMAL = 1,
    NBI_TOKEN_CONTROL = 3,
    NBI_TOKEN_USER = 4,
    NBI_TOKEN_UNUSED = 5
};

#define NBI_VOCAB_MAX (1 << 22) /* all ids are smaller */

/* How an added token is matched in a text. */
enum nbi_token_flags {
    NBI_TOKEN_LSTRIP = 1,      /* includes the white space before it */
    NBI_TOKEN_RSTRIP = 2,      /* includes the white space after it */
    NBI_TOKEN_SINGLE_WORD = 4, /* not inside a word */
    NBI_TOKEN_NORMALIZED = 8,  /* matched after NFC */
    NBI_TOKEN_MODEL = 16       /* also in the vocabulary that merges produce */
};

struct nbi_token {
    const char *text; /* byte-level alphabet; added tokens: plain text; NULL: unused id */
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
    bool nfc;           /* normalise text to NFC first */
    bool ignore_merges; /* a word that is itself a token is not merged from bytes */
    struct nbi_split_rules split;
    const char *chat_template; /* NULL: none */
    int64_t bos, eos, pad;     /* -1: none */
    bool add_bos;
};

void nbi_vocab_init(struct nbi_vocab *v); /* no tokens; NFC and Qwen's pre-tokenizer */
void nbi_vocab_release(struct nbi_vocab *v);

/* Reads a tokenizer.json only. */
enum nb_status nbi_vocab_read_json(struct nbi_vocab *v, const char *path);

/* Reads dir/tokenizer.json and, if they exist, dir/tokenizer_config.json and
 * dir/chat_template.jinja. NB_ENOTFOUND without tokenizer.json. */
enum nb_status nbi_vocab_read_dir(struct nbi_vocab *v, const char *dir);

/* Reads only the chat template and the special tokens. A missing file is no error. */
enum nb_status nbi_vocab_read_config(struct nbi_vocab *v, const char *dir);

/* NB_ENOTFOUND if the file contains no tokenizer. */
enum nb_status nbi_vocab_read_gguf(struct nbi_vocab *v, const struct nbi_store *store);

/* Write tokenizer.json, tokenizer_config.json, or both into a directory. The first requires Qwen's
 * rules (nbi_vocab_is_qwen). */
enum nb_status nbi_vocab_write_json(const struct nbi_vocab *v, const char *path);
enum nb_status nbi_vocab_write_config(const struct nbi_vocab *v, const char *path);
enum nb_status nbi_vocab_write_dir(const struct nbi_vocab *v, const char *dir);

/* Sets the token of an id and grows the table if needed. A second text for one id is an error. The
 * text must live as long as v: in v->arena, or static. */
enum nb_status nbi_vocab_set(struct nbi_vocab *v, int64_t id, struct nbi_token token);

/* text is "left right" and must live as long as v. */
enum nb_status nbi_vocab_add_merge(struct nbi_vocab *v, const char *text, size_t len);

/* Whether text is handled as Qwen does: NFC, Qwen's pattern, no ignore_merges. */
bool nbi_vocab_is_qwen(const struct nbi_vocab *v);

/* The byte that a character of the byte-level alphabet stands for (-1: not in the alphabet), and
 * the character that stands for a byte. */
int nbi_byte_of(uint32_t character);
uint32_t nbi_byte_character(uint8_t byte);

/* Call after the last nbi_vocab_set; trims count to the highest id in use. */
void nbi_vocab_finish(struct nbi_vocab *v);

/* Appends GGUF metadata for a model with vocab_size >= v->count embedding rows. Unused ids become
 * "[PADn]". */
enum nb_status nbi_vocab_write_gguf(const struct nbi_vocab *v, struct nbi_gguf_meta *meta,
                                    int64_t vocab_size);

/* Appends the ids of the special tokens, which are useful without a vocabulary too. */
void nbi_vocab_write_ids(const struct nbi_vocab *v, struct nbi_gguf_meta *meta);
