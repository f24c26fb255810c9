/* added.h - finding added tokens (<|im_start|> and the like) in a text. */
#pragma once

#include "tokenizer/vocab.h"

struct nbi_added_token {
    const char *text; /* borrowed */
    size_t len;
    int32_t id;
    uint8_t flags; /* enum nbi_token_flags */
    bool special;
};

struct nbi_added {
    struct nbi_added_token *tokens;
    size_t count;
    uint8_t starts[256]; /* whether a token starts with that byte */
    const uint8_t *classes;
};

/* Takes over tokens (from malloc). classes (unicode.h) must outlive it. */
void nbi_added_init(struct nbi_added *a, struct nbi_added_token *tokens, size_t count,
                    const uint8_t *classes);
void nbi_added_release(struct nbi_added *a);

/* A part of a text: one added token, with the white space it takes along, or what is between. */
struct nbi_added_part {
    size_t start, end;
    const struct nbi_added_token *token; /* NULL: text */
};

/* Goes through a text part by part; the parts cover it. Where tokens overlap, the one that starts
 * first counts, and of those the longest. Special ones are passed over unless special is set. */
struct nbi_added_iter {
    const struct nbi_added *added;
    const char *text;
    size_t len, done, from;
    bool special;
    size_t spaces_start, spaces_end; /* white space that was walked over; none while start > end */
    struct nbi_added_part pending;   /* a token found behind text that was handed out first */
};

void nbi_added_iter_init(struct nbi_added_iter *it, const struct nbi_added *a, const char *text,
                         size_t len, bool special);
bool nbi_added_next(struct nbi_added_iter *it, struct nbi_added_part *part);
