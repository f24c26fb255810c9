/* vocab.h - a tokenizer as data: what tokenizer.json and a GGUF both hold, to carry it from one to
 * the other. Text is not encoded here.
 *
 * The byte-level BPE of the Qwen family: a vocabulary, merges, added tokens, its one split
 * pattern. Anything else is named and refused. */
#pragma once

#include "base/arena.h"
#include "formats/store.h"
#include "formats/writer.h"

/* GGUF's numbers. */
enum nbi_token_type {
    NBI_TOKEN_NORMAL = 1,
    NBI_TOKEN_CONTROL = 3,
    NBI_TOKEN_USER = 4,
    NBI_TOKEN_UNUSED = 5
};

struct nbi_token {
    const char *text; /* byte-level form; added tokens as they are; NULL: no token has this id */
    enum nbi_token_type type;
};

struct nbi_vocab {
    struct nbi_arena arena;
    struct nbi_token *tokens;
    int64_t count;
    const char **merges; /* "left right" */
    int64_t merge_count;
    const char *chat_template; /* NULL: none */
    int64_t bos, eos, pad;     /* -1: none */
    bool add_bos;
};

void nbi_vocab_init(struct nbi_vocab *v); /* empty, without special tokens */
void nbi_vocab_release(struct nbi_vocab *v);

/* From DIR/tokenizer.json, and DIR/tokenizer_config.json and DIR/chat_template.jinja for the
 * chat template and special tokens if those are there. NB_ENOTFOUND without tokenizer.json. */
enum nb_status nbi_vocab_read_dir(struct nbi_vocab *v, const char *dir);

/* Only the chat template and the special tokens; a directory without those files gives none. */
enum nb_status nbi_vocab_read_config(struct nbi_vocab *v, const char *dir);

/* NB_ENOTFOUND if the file holds no tokenizer. */
enum nb_status nbi_vocab_read_gguf(struct nbi_vocab *v, const struct nbi_store *store);

/* Writes DIR/tokenizer.json and DIR/tokenizer_config.json. */
enum nb_status nbi_vocab_write_dir(const struct nbi_vocab *v, const char *dir);

/* Appends the metadata for a model of vocab_size rows, at least v->count; ids without a token
 * become "[PADn]". */
enum nb_status nbi_vocab_write_gguf(const struct nbi_vocab *v, struct nbi_gguf_meta *meta,
                                    int64_t vocab_size);

/* The ids of special tokens, which also make sense without a vocabulary. */
void nbi_vocab_write_ids(const struct nbi_vocab *v, struct nbi_gguf_meta *meta);
