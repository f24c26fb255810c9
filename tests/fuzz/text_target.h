/* text_target.h - shared by the fuzz targets for text: a small tokenizer with Qwen's rules, and
 * invariants of decoding. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/utf8.h"
#include "tokenizer/bpe_train.h"
#include "tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Aborts; the fuzzer's stack trace shows the line. */
#define MUST(what)                                                                                 \
    do {                                                                                           \
        if (!(what))                                                                               \
            abort();                                                                               \
    } while (0)

/* The path of a file for one input, in memory if possible. The caller creates and removes it. */
static inline const char *scratch_path(const char *ending)
{
    static char path[64];
    snprintf(path, sizeof path, "%s/nibble-fuzz-%d%s",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid(), ending);
    return path;
}

/* All bytes, some merges in three scripts, and the 26 chat tokens; made once. */
static inline struct nb_tokenizer *small_tokenizer(void)
{
    static const char text[] =
        "the quick brown fox and the lazy dog\n\nthe end of the line, then another line\n"
        "who are you? I am the assistant; you are the user. It's 1234567890 o'clock\r\n"
        "\xE4\xBD\xA0\xE6\x98\xAF\xE8\xB0\x81\xEF\xBC\x9F\xE6\x88\x91\xE6\x98\xAF\xE8\xB0\x81"
        "\xE4\xBD\xA0\xE6\x98\xAF\xE8\xB0\x81 \xC3\xA9t\xC3\xA9 \xC3\xA9t\xC3\xA9 "
        "\xEA\xB0\x80\xEA\xB0\x81 \xEA\xB0\x80\xEA\xB0\x81   \n  \n\n";
    static struct nb_tokenizer *made;
    struct nbi_bpe_trainer *t;
    struct nbi_vocab v;
    if (made)
        return made;
    const struct nbi_bpe_trainer_opts opts = {.vocab = NBI_BPE_TRAINER_MIN + 100, .min_count = 2};
    MUST(nbi_bpe_trainer_new(&t) == NB_OK);
    MUST(nbi_bpe_trainer_add(t, text, sizeof text - 1) == NB_OK);
    MUST(nbi_bpe_trainer_run(t, &opts, &v) == NB_OK);
    MUST(nbi_tokenizer_new(&made, &v) == NB_OK);
    nbi_vocab_release(&v);
    nbi_bpe_trainer_free(t);
    return made;
}

/* Decoding token by token gives the same text as at once, except for malformed bytes. */
static inline void check_stream(const struct nb_tokenizer *t, const int32_t *ids, size_t count,
                                const char *whole, size_t len)
{
    struct nb_decoder d = {0};
    struct nbi_str stream = {0}, wanted = {0};
    const char *text;
    size_t n;
    for (size_t i = 0; i <= count; i++) {
        MUST(nb_decoder_next(&d, t, i < count ? ids[i] : -1, &text, &n) == NB_OK);
        MUST(nbi_utf8_valid(text, n));
        nbi_str_append(&stream, text, n);
    }
    nbi_utf8_repair(&wanted, whole, len);
    MUST(stream.len == wanted.len);
    MUST(memcmp(nbi_str_text(&stream), nbi_str_text(&wanted), wanted.len) == 0);
    nbi_str_release(&stream);
    nbi_str_release(&wanted);
    nb_decoder_release(&d);
}
