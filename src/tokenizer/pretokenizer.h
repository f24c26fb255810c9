/* pretokenizer.h - splits text into words; merges never cross a word boundary.
 *
 * The rules are the pre_tokenizer of a tokenizer.json: one or more patterns, each splitting the
 * pieces that the previous one left. Qwen's pattern is matched by dedicated code, which is faster
 * and does not depend on the Unicode version of the installed PCRE2. All other patterns go through
 * PCRE2. Qwen's takes linear time; what another takes depends on the pattern. */
#pragma once

#include "base/arena.h"
#include "tokenizer/unicode.h"

/* Which pieces a stage passes on. */
enum nbi_split_keep {
    NBI_SPLIT_ALL,     /* matches and the text between them */
    NBI_SPLIT_MATCHES, /* matches only */
    NBI_SPLIT_REST     /* only the text between matches */
};

struct nbi_split_stage {
    const char *pattern; /* a regular expression in Oniguruma's syntax */
    enum nbi_split_keep keep;
};

#define NBI_SPLIT_STAGES 8

struct nbi_split_rules {
    int count;
    struct nbi_split_stage stage[NBI_SPLIT_STAGES];
    bool prefix_space; /* insert a space before a text that does not start with one */
};

extern const char nbi_qwen_pattern[];
extern const char nbi_gpt2_pattern[]; /* of ByteLevel with use_regex */

/* Whether the rules are exactly Qwen's. */
bool nbi_split_is_qwen(const struct nbi_split_rules *rules);

struct nbi_splitter;

/* classes is the table of unicode.h and must outlive the splitter. A pattern that PCRE2 and
 * Oniguruma would interpret differently is an error. */
enum nb_status nbi_splitter_new(struct nbi_splitter **out, const struct nbi_split_rules *rules,
                                const uint8_t *classes);
void nbi_splitter_free(struct nbi_splitter *s);

/* Scratch memory of one thread; start with {0}. */
struct nbi_split_scratch {
    void *match, *context, *stack; /* PCRE2's */
    struct nbi_str text;
};

void nbi_split_scratch_release(struct nbi_split_scratch *scratch);

typedef enum nb_status (*nbi_word_fn)(void *ctx, const char *word, size_t len);

/* Calls fn for each word of a well-formed UTF-8 text, in order. Words are never empty. */
enum nb_status nbi_split(const struct nbi_splitter *s, struct nbi_split_scratch *scratch,
                         const char *text, size_t len, nbi_word_fn fn, void *ctx);
