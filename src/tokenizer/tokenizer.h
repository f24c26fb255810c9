/* tokenizer.h - the public tokenizer seen from inside the library. */
#pragma once

#include "tokenizer/bpe.h"

/* Where a model keeps its tokenizer and chat template. */
enum nbi_text_kind { NBI_TEXT_DIR, NBI_TEXT_JSON, NBI_TEXT_GGUF };

struct nbi_tokenizer_source {
    enum nbi_text_kind kind;
    char *path; /* the directory, the tokenizer.json or the GGUF; the caller frees it */
};

/* model: a directory, a tokenizer.json, a GGUF or a weights file; model_dir (may be NULL) wins. */
enum nb_status nbi_tokenizer_source(const char *model, const char *model_dir,
                                    struct nbi_tokenizer_source *out);

enum nb_status nbi_tokenizer_new(struct nb_tokenizer **out, const struct nbi_vocab *v);
const struct nbi_bpe *nbi_tokenizer_bpe(const struct nb_tokenizer *t);

/* nbi_encode (bpe.h) for any number of threads at once. */
enum nb_status nbi_tokenizer_encode(struct nb_tokenizer *t, const char *text, size_t len,
                                    bool special, struct nbi_ids *ids);
