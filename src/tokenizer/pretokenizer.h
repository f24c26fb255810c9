/* pretokenizer.h - text into words, inside which the merges then work.
 *
 * The rules are a tokenizer.json's pre_tokenizer: one or more patterns, each cutting the pieces
 * that the one before left. Qwen's own pattern is matched by code written for it: faster, and equal
 * to the reference whatever Unicode version the installed PCRE2 has. Any other pattern goes through
 * PCRE2. Both take time linear in the text, unless a foreign pattern itself does not. */
#pragma once

#include "base/arena.h"
#include "tokenizer/unicode.h"

/* What of the text becomes words. */
enum nbi_split_keep {
    NBI_SPLIT_ALL,     /* matches, and what is between them */
    NBI_SPLIT_MATCHES, /* matches alone */
    NBI_SPLIT_REST     /* what is between them */
};

struct nbi_split_stage {
    const char *pattern; /* a regular expression as the Oniguruma library reads them */
    enum nbi_split_keep keep;
};

#define NBI_SPLIT_STAGES 8

struct nbi_split_rules {
    int count;
    struct nbi_split_stage stage[NBI_SPLIT_STAGES];
    bool prefix_space; /* a space goes in front of a text that does not start with one */
};

extern const char nbi_qwen_pattern[];
extern const char nbi_gpt2_pattern[]; /* what ByteLevel with use_regex stands for */

/* Whether these are Qwen's rules and nothing else. */
bool nbi_split_is_qwen(const struct nbi_split_rules *rules);

struct nbi_splitter;

/* classes (unicode.h) must outlive the splitter. Refuses a pattern that PCRE2 would read in another
 * way. */
enum nb_status nbi_splitter_new(struct nbi_splitter **out, const struct nbi_split_rules *rules,
                                const uint8_t *classes);
void nbi_splitter_free(struct nbi_splitter *s);

/* What one thread needs beside it; zeroed to begin with. */
struct nbi_split_scratch {
    void *match, *context, *stack; /* PCRE2's */
    struct nbi_str text;
};

void nbi_split_scratch_release(struct nbi_split_scratch *scratch);

typedef enum nb_status (*nbi_word_fn)(void *ctx, const char *word, size_t len);

/* Calls fn for every word of well-formed text, in order; words are never empty. */
enum nb_status nbi_split(const struct nbi_splitter *s, struct nbi_split_scratch *scratch,
                         const char *text, size_t len, nbi_word_fn fn, void *ctx);
