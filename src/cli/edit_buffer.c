/* edit_buffer.c - the text of a line being edited. */
#include "cli/edit_buffer.h"

#include <string.h>

#include <utf8proc.h>

#include "base/array.h"
#include "base/utf8.h"

#define LOOK_BACK 256

/* ---- characters ---- */

static utf8proc_int32_t char_at(const struct cli_edit *e, size_t at, size_t *next)
{
    *next = at + (size_t)nbi_utf8_length(e->text + at, e->text + e->len);
    return (utf8proc_int32_t)nbi_utf8_decode(e->text + at);
}

/* The end of the grapheme that starts at `at`. */
static size_t grapheme_end(const struct cli_edit *e, size_t at)
{
    utf8proc_int32_t state = 0;
    size_t next;
    if (at >= e->len)
        return e->len;
    utf8proc_int32_t before = char_at(e, at, &next);
    for (at = next; at < e->len; at = next) {
        utf8proc_int32_t c = char_at(e, at, &next);
        if (utf8proc_grapheme_break_stateful(before, c, &state))
            break;
        before = c;
    }
    return at;
}

static size_t char_before(const struct cli_edit *e, size_t at)
{
    while (at > 0 && ((unsigned char)e->text[--at] & 0xC0) == 0x80) {
    }
    return at;
}

/* Whether `at` is a boundary no matter what precedes the two characters around it. */
static bool surely_boundary(const struct cli_edit *e, size_t at)
{
    size_t next;
    if (at == 0)
        return true;
    utf8proc_int32_t before = char_at(e, char_before(e, at), &next);
    return utf8proc_grapheme_break(before, char_at(e, at, &next));
}

/* The last start of a grapheme before `at`: steps back to a sure boundary, then forward. LOOK_BACK
 * bounds the work on hostile text; real graphemes are shorter. */
static size_t grapheme_start(const struct cli_edit *e, size_t at)
{
    if (at == 0)
        return 0;
    size_t from = char_before(e, at);
    for (int n = 0; n < LOOK_BACK && !surely_boundary(e, from); n++)
        from = char_before(e, from);
    for (size_t end; (end = grapheme_end(e, from)) < at;)
        from = end;
    return from;
}

/* The first boundary at or after `at`: a change may have joined two graphemes. */
static size_t boundary(const struct cli_edit *e, size_t at)
{
    return at == 0 || at >= e->len ? at : grapheme_end(e, grapheme_start(e, at));
}

static bool is_blank(const struct cli_edit *e, size_t at)
{
    return strchr(" \t\n", e->text[at]) != NULL;
}

/* Whether a character belongs to a word. */
static bool in_word(const struct cli_edit *e, size_t at)
{
    size_t next;
    switch (utf8proc_category(char_at(e, at, &next))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return true;
    default:
        return false;
    }
}

static bool is_delimiter(const struct cli_edit *e, size_t at, bool blanks)
{
    return blanks ? is_blank(e, at) : !in_word(e, at);
}

static size_t word_start(const struct cli_edit *e, size_t at, bool blanks)
{
    bool seen = false;
    while (at > 0) {
        size_t before = grapheme_start(e, at);
        bool delimiter = is_delimiter(e, before, blanks);
        if (seen && delimiter)
            break;
        seen = seen || !delimiter;
        at = before;
    }
    return at;
}

static size_t word_end(const struct cli_edit *e, size_t at)
{
    while (at < e->len && !in_word(e, at))
        at = grapheme_end(e, at);
    while (at < e->len && in_word(e, at))
        at = grapheme_end(e, at);
    return at;
}

static size_t find_place(const struct cli_edit *e, enum cli_edit_place place)
{
    switch (place) {
    case CLI_EDIT_LEFT:
        return grapheme_start(e, e->cursor);
    case CLI_EDIT_RIGHT:
        return grapheme_end(e, e->cursor);
    case CLI_EDIT_WORD_LEFT:
    case CLI_EDIT_BLANK_LEFT:
        return word_start(e, e->cursor, place == CLI_EDIT_BLANK_LEFT);
    case CLI_EDIT_WORD_RIGHT:
        return word_end(e, e->cursor);
    case CLI_EDIT_START:
        return 0;
    case CLI_EDIT_END:
        break;
    }
    return e->len;
}

/* ---- changes ---- */

void cli_edit_release(struct cli_edit *e)
{
    free(e->text);
    free(e->cut);
    *e = (struct cli_edit){0};
}

void cli_edit_clear(struct cli_edit *e)
{
    e->len = e->cursor = 0;
    e->cutting = false;
}

/* Copies the characters that a text may hold; the result is never longer. */
static size_t filter(char *out, const char *bytes, size_t len)
{
    const char *end = bytes + len;
    size_t used = 0;
    for (const char *p = bytes; p < end;) {
        int n = nbi_utf8_length(p, end);
        bool line_end = *p == '\n' || *p == '\r';
        if (line_end) {
            p += *p == '\r' && end - p > 1 && p[1] == '\n';
            out[used++] = '\n';
        } else if (n > 0 && (*p == '\t' || nbi_utf8_printable(p, (size_t)n))) {
            memcpy(out + used, p, (size_t)n);
            used += (size_t)n;
        }
        p += n > 0 ? n : 1;
    }
    return used;
}

enum nb_status cli_edit_insert(struct cli_edit *e, const char *bytes, size_t len, bool *fits)
{
    *fits = len <= CLI_EDIT_MAX && e->len <= CLI_EDIT_MAX - len;
    e->cutting = false;
    if (!*fits || len == 0)
        return NB_OK;
    NBI_TRY(NBI_ARRAY_RESERVE(e->text, e->cap, e->len + len, "a line"));
    char *at = e->text + e->cursor;
    size_t tail = e->len - e->cursor;
    memmove(at + len, at, tail);
    size_t used = filter(at, bytes, len);
    memmove(at + used, at + len, tail);
    e->len += used;
    e->cursor = boundary(e, e->cursor + used);
    return NB_OK;
}

enum nb_status cli_edit_set(struct cli_edit *e, const char *bytes, size_t len)
{
    bool fits;
    NBI_TRY(NBI_ARRAY_RESERVE(e->text, e->cap, len, "a line")); /* from here on nothing fails */
    cli_edit_clear(e);
    return cli_edit_insert(e, bytes, len, &fits);
}

void cli_edit_move(struct cli_edit *e, enum cli_edit_place to)
{
    e->cursor = find_place(e, to);
    e->cutting = false;
}

static void remove_range(struct cli_edit *e, size_t from, size_t to)
{
    if (from == to)
        return;
    memmove(e->text + from, e->text + to, e->len - to);
    e->len -= to - from;
    e->cursor = boundary(e, from);
}

void cli_edit_delete(struct cli_edit *e, enum cli_edit_place to)
{
    size_t place = find_place(e, to);
    bool left = place < e->cursor;
    remove_range(e, left ? place : e->cursor, left ? e->cursor : place);
    e->cutting = false;
}

enum nb_status cli_edit_cut(struct cli_edit *e, enum cli_edit_place to)
{
    size_t place = find_place(e, to), from = place < e->cursor ? place : e->cursor;
    size_t n = (place < e->cursor ? e->cursor : place) - from;
    size_t kept = e->cutting ? e->cut_len : 0;
    if (n == 0)
        return NB_OK;
    /* One cut always fits, but consecutive cuts add up. */
    if (kept > CLI_EDIT_MAX - n)
        kept = 0;
    char *cut = malloc(kept + n);
    if (!cut)
        return nbi_fail_memory("a cut", kept + n);
    bool before = place < e->cursor;
    if (kept > 0)
        memcpy(before ? cut + n : cut, e->cut, kept);
    memcpy(before ? cut : cut + kept, e->text + from, n);
    free(e->cut);
    e->cut = cut;
    e->cut_len = kept + n;
    remove_range(e, from, from + n);
    e->cutting = true;
    return NB_OK;
}

enum nb_status cli_edit_yank(struct cli_edit *e, bool *fits)
{
    return cli_edit_insert(e, e->cut, e->cut_len, fits);
}

enum nb_status cli_edit_transpose(struct cli_edit *e)
{
    size_t middle = e->cursor == e->len ? grapheme_start(e, e->len) : e->cursor;
    size_t from = grapheme_start(e, middle), to = grapheme_end(e, middle);
    size_t first = middle - from, second = to - middle;
    e->cutting = false;
    if (first == 0 || second == 0)
        return NB_OK;
    char *copy = malloc(first);
    if (!copy)
        return nbi_fail_memory("a character", first);
    memcpy(copy, e->text + from, first);
    memmove(e->text + from, e->text + middle, second);
    memcpy(e->text + from + second, copy, first);
    free(copy);
    e->cursor = boundary(e, to);
    return NB_OK;
}
