/* added.h - finds added tokens, such as <|im_start|>, in a text.
 *
 * The text must be well-formed UTF-8. Where tokens overlap, the one that starts first wins; of
 * those that start together, the longest. */
#pragma once

#include "tokenizer/vocab.h"

struct nbi_added_token {
    const char *text; /* borrowed; must outlive struct nbi_added */
    size_t len;
    int32_t id;
    uint8_t flags; /* enum nbi_token_flags */
    bool special;
};

struct nbi_added {
    struct nbi_added_token *tokens; /* sorted by text */
    size_t count;
    uint8_t starts[256]; /* 1: some token starts with this byte */
    const uint8_t *classes;
};

/* Takes ownership of tokens, which came from malloc(), and sorts them. classes is the table of
 * unicode.h and must outlive *a. */
void nbi_added_init(struct nbi_added *a, struct nbi_added_token *tokens, size_t count,
                    const uint8_t *classes);
void nbi_added_release(struct nbi_added *a);

/* A piece of a text: one added token, including the white space that its flags strip, or the text
 * between two tokens. */
struct nbi_added_part {
    size_t start, end;
    const struct nbi_added_token *token; /* NULL: ordinary text */
};

/* Yields the parts of a text in order; together they cover it. Unless `special` is set, special
 * tokens are treated as ordinary text. */
struct nbi_added_iter {
    const struct nbi_added *added;
    const char *text;
    size_t len;
    size_t done; /* end of the last part returned */
    size_t from; /* where to look for the next token */
    bool special;
    size_t spaces_start, spaces_end; /* last white space scanned; start > end: none yet */
    struct nbi_added_part pending;   /* a token whose preceding text was returned first */
};

void nbi_added_iter_init(struct nbi_added_iter *it, const struct nbi_added *a, const char *text,
                         size_t len, bool special);
bool nbi_added_next(struct nbi_added_iter *it, struct nbi_added_part *part);
