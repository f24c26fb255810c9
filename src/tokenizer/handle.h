/* handle.h - the public tokenizer seen from inside the library. */
#pragma once

#include "tokenizer/bpe.h"

/* The vocabulary of a model, as nb_tokenizer_open finds it. */
enum nb_status nbi_vocab_read_model(struct nbi_vocab *v, const char *model, const char *model_dir);

enum nb_status nbi_tokenizer_new(struct nb_tokenizer **out, const struct nbi_vocab *v);
const struct nbi_bpe *nbi_tokenizer_bpe(const struct nb_tokenizer *t);
struct nbi_encoder *nbi_tokenizer_encoder(struct nb_tokenizer *t);
