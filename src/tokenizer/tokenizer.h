/* tokenizer.h - the public struct nb_tokenizer, for use inside the library. Threads may share it.
 */
#pragma once

#include "nibble/text.h"
#include "tokenizer/bpe.h"

/* Where the tokenizer and the chat template of a model are stored. */
enum nbi_tokenizer_source_kind { NBI_TOKENIZER_DIR, NBI_TOKENIZER_JSON, NBI_TOKENIZER_GGUF };

struct nbi_tokenizer_source {
    enum nbi_tokenizer_source_kind kind;
    char *path; /* directory, tokenizer.json or GGUF; the caller frees it */
};

/* model is a directory, a tokenizer.json, a GGUF or a weights file. model_dir takes precedence
 * unless it is NULL. */
enum nb_status nbi_tokenizer_source(const char *model, const char *model_dir,
                                    struct nbi_tokenizer_source *out);

enum nb_status nbi_tokenizer_new(struct nb_tokenizer **out, const struct nbi_vocab *v);
const struct nbi_bpe *nbi_tokenizer_bpe(const struct nb_tokenizer *t);

/* nbi_encode (bpe.h); safe to call from several threads at once. */
enum nb_status nbi_tokenizer_encode(struct nb_tokenizer *t, const char *text, size_t len,
                                    bool special, struct nbi_ids *ids);
