/* data_support.h - helpers of the data tests: tokenizers, and examples written by hand. */
#pragma once

#include "base/utf8.h"
#include "data/example.h"
#include "tokenizer/bpe_train.h"
#include "unit/chat_tokens.h"
#include "unit/support.h"

/* A tokenizer trained on a text; an empty text gives the bytes and the chat tokens. */
static inline struct nb_tokenizer *new_tokenizer(const char *text, int64_t merges)
{
    struct nbi_bpe_trainer *trainer;
    struct nbi_vocab v;
    struct nb_tokenizer *t;
    const struct nbi_bpe_trainer_opts opts = {.vocab = NBI_BPE_TRAINER_MIN + merges,
                                              .min_count = 2};
    assert_ok(nbi_bpe_trainer_new(&trainer));
    assert_ok(nbi_bpe_trainer_add(trainer, text, strlen(text)));
    assert_ok(nbi_bpe_trainer_run(trainer, &opts, &v));
    assert_ok(nbi_tokenizer_new(&t, &v));
    nbi_vocab_release(&v);
    nbi_bpe_trainer_free(trainer);
    return t;
}

/* The id of a byte in the tokenizer without merges. */
static inline int32_t byte_id(uint8_t byte)
{
    static int32_t ids[256];
    static bool ready;
    if (!ready) {
        struct nb_tokenizer *t = new_tokenizer("", 0);
        for (int32_t id = 0; id < 256; id++) {
            size_t len;
            const char *text = nbi_bpe_token(nbi_tokenizer_bpe(t), id, &len);
            assert_int_equal(len, 1);
            ids[(uint8_t)text[0]] = id;
        }
        nb_tokenizer_close(t);
        ready = true;
    }
    return ids[byte];
}

/* The id of the chat token that text starts with, and its length; -1: none. */
static inline int32_t chat_id(const char *text, size_t *len)
{
    for (int i = 0; i < 26; i++) {
        *len = strlen(chat_tokens[i]);
        if (strncmp(text, chat_tokens[i], *len) == 0)
            return 256 + i;
    }
    return -1;
}

/* Makes an example without merges from its text, with [[ ]] around what is trained on. */
static inline void write_example(struct nbi_example *s, const char *text)
{
    size_t n = strlen(text) + 1, len;
    bool trained = false;
    *s = (struct nbi_example){.capacity = n};
    s->trained = malloc(n);
    s->ids.p = malloc(n * sizeof *s->ids.p);
    s->ids.cap = n;
    while (*text) {
        if (strncmp(text, "[[", 2) == 0 || strncmp(text, "]]", 2) == 0) {
            trained = *text == '[';
            text += 2;
            continue;
        }
        int32_t id = chat_id(text, &len);
        s->trained[s->ids.count] = trained;
        s->ids.p[s->ids.count++] = id >= 0 ? id : byte_id((uint8_t)*text);
        text += id >= 0 ? len : 1;
    }
}

/* The inverse, for messages. */
static inline void read_example(struct nbi_str *out, const struct nbi_example *s)
{
    bool trained = false;
    static uint8_t byte_of[256];
    for (int b = 0; b < 256; b++)
        byte_of[byte_id((uint8_t)b)] = (uint8_t)b;
    for (size_t i = 0; i < s->ids.count; i++) {
        if (s->trained[i] != trained)
            nbi_str_puts(out, trained ? "]]" : "[[");
        trained = s->trained[i];
        if (s->ids.p[i] >= 256)
            nbi_str_puts(out, chat_tokens[s->ids.p[i] - 256]);
        else
            nbi_str_append(out, &byte_of[s->ids.p[i]], 1);
    }
    nbi_str_puts(out, trained ? "]]" : "");
}

static inline void assert_example(const struct nbi_example *s, const char *text)
{
    struct nbi_example wanted;
    struct nbi_str got = {0};
    write_example(&wanted, text);
    if (s->ids.count != wanted.ids.count ||
        memcmp(s->ids.p, wanted.ids.p, s->ids.count * sizeof *s->ids.p) != 0 ||
        memcmp(s->trained, wanted.trained, s->ids.count) != 0) {
        read_example(&got, s);
        fail_msg("'%s' wanted, got '%s'", text, nbi_str_text(&got));
    }
    nbi_example_release(&wanted);
}

/* Reproducible random numbers. */
static inline uint32_t draw(uint64_t *state, uint32_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}
