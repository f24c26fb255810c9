/* added.c - finds added tokens by binary search in a sorted list, one byte at a time. */
#include "tokenizer/added.h"

#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

static int compare(const void *a, const void *b)
{
    const struct nbi_added_token *x = a, *y = b;
    size_t n = x->len < y->len ? x->len : y->len;
    int order = memcmp(x->text, y->text, n);
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

void nbi_added_init(struct nbi_added *a, struct nbi_added_token *tokens, size_t count,
                    const uint8_t *classes)
{
    *a = (struct nbi_added){.tokens = tokens, .count = count, .classes = classes};
    if (count > 0)
        qsort(tokens, count, sizeof *tokens, compare);
    for (size_t i = 0; i < count; i++)
        a->starts[(uint8_t)tokens[i].text[0]] = 1;
}

void nbi_added_release(struct nbi_added *a)
{
    free(a->tokens);
    *a = (struct nbi_added){0};
}

/* Returns the first token in [low, high) whose byte i is at least `byte`. All of them share the
 * bytes before i; one of exactly i bytes sorts first. */
static const struct nbi_added_token *bound(const struct nbi_added_token *low,
                                           const struct nbi_added_token *high, size_t i, int byte)
{
    while (low < high) {
        const struct nbi_added_token *middle = low + (high - low) / 2;
        int at = middle->len > i ? (uint8_t)middle->text[i] : -1;
        if (at < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the longest token that is a prefix of p. Tokens with a common prefix are adjacent,
 * shortest first, so each byte narrows the range to those that share it. */
static const struct nbi_added_token *longest(const struct nbi_added *a, const char *p, size_t len)
{
    const struct nbi_added_token *low = a->tokens, *high = a->tokens + a->count, *found = NULL;
    for (size_t i = 0; i < len && low < high; i++) {
        uint8_t byte = (uint8_t)p[i];
        low = bound(low, high, i, byte);
        high = bound(low, high, i, byte + 1);
        if (low < high && low->len == i + 1)
            found = low;
    }
    return found;
}

/* Finds the next token that starts at `from` or later; NULL: none. */
static const struct nbi_added_token *find(const struct nbi_added_iter *it, size_t from, size_t *at)
{
    const struct nbi_added_token *t = NULL;
    size_t i = from;
    for (; i < it->len; i++)
        if (it->added->starts[(uint8_t)it->text[i]] &&
            (t = longest(it->added, it->text + i, it->len - i)))
            break;
    *at = i;
    return t;
}

/* Whether a regular expression's \w matches: letters by our table, everything else by utf8proc. */
static bool is_word(const uint8_t *classes, const char *p)
{
    uint32_t c = nbi_utf8_decode(p);
    if ((classes[c] & NBI_CHAR_KIND) == NBI_CHAR_LETTER)
        return true;
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default: /* joiners, circled and squared letters */
        return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
               (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
               (c >= 0x1F170 && c <= 0x1F189);
    }
}

static bool is_space(const struct nbi_added_iter *it, size_t at)
{
    return (it->added->classes[nbi_utf8_decode(it->text + at)] & NBI_CHAR_KIND) == NBI_CHAR_SPACE;
}

static size_t previous_char(const char *text, size_t at)
{
    return (size_t)(nbi_char_before(text + at) - text);
}

/* Whether a token found at [start, end) is one: special tokens must be wanted, and a single-word
 * token must not touch another word. */
static bool accept(const struct nbi_added_iter *it, const struct nbi_added_token *t, size_t start,
                   size_t end)
{
    if (t->special && !it->special)
        return false;
    if (!(t->flags & NBI_TOKEN_SINGLE_WORD))
        return true;
    return (start == 0 ||
            !is_word(it->added->classes, it->text + previous_char(it->text, start))) &&
           (end == it->len || !is_word(it->added->classes, it->text + end));
}

void nbi_added_iter_init(struct nbi_added_iter *it, const struct nbi_added *a, const char *text,
                         size_t len, bool special)
{
    *it = (struct nbi_added_iter){
        .added = a, .text = text, .len = len, .special = special, .spaces_start = 1};
}

/* Returns the end of the white space at `at`. The last run is cached: tokens that strip white space
 * on the right would otherwise scan a long run once per token, in quadratic time. */
static size_t past_spaces(struct nbi_added_iter *it, size_t at)
{
    if (at >= it->spaces_start && at <= it->spaces_end)
        return it->spaces_end;
    it->spaces_start = at;
    while (at < it->len && is_space(it, at))
        at += (size_t)nbi_char_length(it->text + at);
    return it->spaces_end = at;
}

/* The next accepted token, extended over the white space that it strips. */
static bool next_token(struct nbi_added_iter *it, struct nbi_added_part *part)
{
    const struct nbi_added_token *t;
    size_t start;
    while (it->added->count > 0 && (t = find(it, it->from, &start))) {
        size_t end = start + t->len;
        it->from = end;
        if (!accept(it, t, start, end))
            continue;
        while ((t->flags & NBI_TOKEN_LSTRIP) && start > it->done &&
               is_space(it, previous_char(it->text, start)))
            start = previous_char(it->text, start);
        if (t->flags & NBI_TOKEN_RSTRIP)
            end = past_spaces(it, end);
        *part = (struct nbi_added_part){start, end, t};
        return true;
    }
    return false;
}

bool nbi_added_next(struct nbi_added_iter *it, struct nbi_added_part *part)
{
    if (it->pending.token) {
        *part = it->pending;
        it->pending.token = NULL;
        it->done = part->end;
        return true;
    }
    struct nbi_added_part token;
    if (!next_token(it, &token)) {
        *part = (struct nbi_added_part){it->done, it->len, NULL};
        bool left = it->done < it->len;
        it->done = it->len;
        return left;
    }
    if (token.start <= it->done) {
        *part = token;
        it->done = token.end;
        return true;
    }
    *part = (struct nbi_added_part){it->done, token.start, NULL};
    it->pending = token;
    return true;
}
